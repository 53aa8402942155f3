"""The metrics of several replicas on one page, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def label_pages(pages: Mapping[str, bytes]) -> bytes:
    """Return one page with the samples of all pages, each with the label `replica`: its page's name.

    The samples of one metric stand together under one header, as the format demands.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        name = ""
        for line in page.decode().splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                known = headers.setdefault(name, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(name, []).append(_with_label(line, replica))
    return "".join(_lines(headers, samples)).encode()


def _lines(headers: Mapping[str, list[str]], samples: Mapping[str, list[str]]) -> Iterator[str]:
    for name, header in headers.items():
        yield from (f"{line}\n" for line in [*header, *samples.get(name, ())])


def _with_label(sample: str, replica: str) -> str:
    """Return `name value` or `name{labels} value` with one more label, the first."""
    name = sample[: min(i for i in (sample.find("{"), sample.find(" ")) if i >= 0)]
    rest = sample[len(name) :]
    label = f'replica="{replica}"'
    if not rest.startswith("{"):
        return f"{name}{{{label}}}{rest}"
    return f"{name}{{{label}{'' if rest.startswith('{}') else ','}{rest[1:]}"
