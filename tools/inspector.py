"""Take pictures of the inspector, light and dark, while requests with different policies run.

python -m tools.inspector --output-dir docs/images        (needs playwright, and chromium in the path)
"""

import argparse
import shutil
import threading
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from tools.serve import start_server

TEXT = """The keeper of the Skellig light wrote down three things every evening: the height of the oil, the
direction of the wind, and the name of any ship that he had seen. On the ninth of March he wrote a
fourth. A boat had come out of the fog without a sound, and a woman in a red coat had asked him, in
French, for the way to Valentia. He gave her bread and pointed north-east. She left him a brass key
and said that somebody would come for it before the summer.

Nobody came. In June he tried the key in every lock on the island: the oil store, the door of the
lower light, the chest in which his predecessor had kept letters. It fitted none of them. In August
he wrote to the Commissioners of Irish Lights, who answered that no boat of that kind was known to
them, and that he was to keep to the oil, the wind and the ships.

Question: what did the woman in the red coat leave with the keeper? Answer:"""
POLICIES = ("h2o:budget=30%,recent=20%", "full", "sinks:budget=64", "keyformer:budget=25%", "full", "h2o:budget=50%")

PROMPT = "\n\n".join(part.replace("\n", " ") for part in TEXT.split("\n\n"))


def main():
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("docs/images"))
    output_dir = parser.parse_args().output_dir
    options = ("--inspect", "--kv-memory", "96MiB", "--max-model-len", "2048", "--tier", "ram:capacity=64MiB")
    with start_server(*options) as (url, _), sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1320, "height": 860})
        page.goto(f"{url.removesuffix('/v1')}/inspect")

        def send(i, max_tokens):
            body = {
                "model": "smollm2",
                "prompt": f"{PROMPT}{' ' * i}",
                "max_tokens": max_tokens,
                "temperature": 0.7,
                "seed": i,
            }
            httpx.post(f"{url}/completions", json={**body, "kv_policy": POLICIES[i], "ignore_eos": True}, timeout=300)

        threads = [threading.Thread(target=send, args=(i, 500 - 40 * i)) for i in range(len(POLICIES))]
        for thread in threads:
            thread.start()
        page.locator("#requests button", has_text="h2o:budget=6").click()  # 30 % of the prompt
        page.locator("#text .token.answer").nth(40).wait_for(state="attached")
        key = page.locator("#text .token", has_text=" key")
        key.first.click()
        page.wait_for_timeout(1500)
        for theme, name in (("light", "inspector.png"), ("dark", "inspector-dark.png")):
            if page.evaluate("document.documentElement.dataset.theme") != theme:
                page.click("#theme")
            page.wait_for_timeout(800)
            page.screenshot(path=output_dir / name)
        browser.close()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
