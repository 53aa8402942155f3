"""The report of a run: a table for people, JSON, and JUnit's XML for test runners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree

from cachecheck.results import CheckResult, Outcome
from cachecheck.server import Server
from cachecheck.terminal import escape_controls

MAX_SHOWN = 5  # problems of a check, in the table


@dataclass(frozen=True)
class CheckReport:
    """Results of all checks that ran against a server."""

    url: str
    server: Server
    seed: int
    results: Sequence[CheckResult]

    @property
    def exit_code(self) -> int:
        """0: checks passed and none found a fault; 1: a fault; 2: an error ended a check, or none could tell."""
        outcomes = {result.outcome for result in self.results}
        if Outcome.FAULT in outcomes:
            return 1
        has_error = any(result.error for result in self.results)
        return 2 if has_error or Outcome.PASSED not in outcomes else 0

    def to_table(self) -> str:
        """Return a line for each check, with its problems below, and lines about the run."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{'check':12} {'cases':>6} {'requests':>9} {'seconds':>8}  result"
        for r in self.results:
            yield f"{r.name:12} {len(r.cases):>6} {r.num_requests:>9} {r.seconds:>8.1f}  {r.verdict}"
            for case in r.problems[:MAX_SHOWN]:
                yield f"    {case.outcome}: {case.what}: {case.detail}"
            if len(r.problems) > MAX_SHOWN:
                yield f"    and {len(r.problems) - MAX_SHOWN} more: see --json"
        server = self.server
        yield ""
        yield (
            f"{server.model} at {self.url}: {server.num_requests} requests, {server.num_cached_tokens} cached tokens; "
            f"seed {self.seed}"
        )
        yield (
            f"cold answers: {server.cold.name or 'the first of each text only'}; log-probabilities may differ by "
            f"{server.tolerance:g} (repeated requests: {server.noise.gap:.2g})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return an object of numbers and texts."""
        server = self.server
        return {
            "url": self.url,
            "model": server.model,
            "seed": self.seed,
            "exit_code": self.exit_code,
            "cold_answers": server.cold.name,
            "tolerance": server.tolerance,
            "noise": asdict(server.noise),
            "requests": server.num_requests,
            "cached_tokens": server.num_cached_tokens,
            "checks": [self._check_to_json(result) for result in self.results],
        }

    def _check_to_json(self, result: CheckResult) -> dict[str, Any]:
        problems = [{"case": c.what, "outcome": c.outcome.value, "detail": c.detail} for c in result.problems]
        return {
            "check": result.name,
            "outcome": result.outcome.value,
            "why_skipped": result.skipped or None,
            "error": result.error or None,
            "cases": len(result.cases),
            "requests": result.num_requests,
            "seconds": round(result.seconds, 3),
            "problems": problems,
        }

    def to_junit(self) -> str:
        """Return XML with a test case for each check."""
        suite = ElementTree.Element("testsuite", name="cachecheck", tests=str(len(self.results)))
        for result in self.results:
            case = ElementTree.SubElement(
                suite, "testcase", classname="cachecheck", name=result.name, time=f"{result.seconds:.3f}"
            )
            tag = {Outcome.FAULT: "failure", Outcome.UNSURE: "skipped", Outcome.SKIPPED: "skipped"}.get(result.outcome)
            if tag:
                element = ElementTree.SubElement(case, tag, message=escape_controls(result.verdict))
                element.text = escape_controls("\n".join(f"{c.outcome}: {c.what}: {c.detail}" for c in result.problems))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
