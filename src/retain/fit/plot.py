"""A picture of a fit: the variance that is explained in each layer, and the distance from the full cache by budget."""

from __future__ import annotations

from pathlib import Path

from retain.fit.evaluation import BUDGETS
from retain.fit.gate import FitReport


def plot_report(report: FitReport, out: Path) -> None:
    """Write the picture as PNG. Raises ValueError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'retain[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), constrained_layout=True)
    left.bar(range(len(report.r2_by_layer)), report.r2_by_layer)
    left.set(xlabel="layer without a window", ylabel="R2 on held-out prompts", title=f"R2 {report.r2:.2f}")
    for name, values in report.kl.items():
        right.plot([100 * b for b in BUDGETS], values, marker="o", label=name)
    right.set(xlabel="budget, % of the prompt", ylabel="KL from the full cache, nats a token", yscale="log")
    if report.kl:
        right.legend()
    figure.savefig(out, dpi=120)
    plt.close(figure)
