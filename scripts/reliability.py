"""The reliability plot of predicted against observed acceptance, as `Calibration` counts it."""

from pathlib import Path
from typing import Any

MOST_AREA = 600.0  # of a marker, square points: the bin that holds most


def plot(path: Path, calibration: dict[str, Any]) -> None:
    """Draw observed against predicted survival: a line per depth, and one of all drafts.

    Args:
        path: PNG to write.
        calibration: `Calibration.as_dict()`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot

    depths = calibration["depths"]
    most = max((each["count"] for each in calibration["bins"]), default=1)
    colours = colormaps["viridis"].resampled(max(len(depths), 2))
    figure, axes = pyplot.subplots(figsize=(6, 6))
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=0.8)
    for index, own in enumerate(depths):
        _line(axes, f"depth {own['depth']}", own, most, color=colours(index), linewidth=0.9)
    _line(axes, "all", calibration, most, color="black", linewidth=2.0)
    axes.set(
        xlabel="predicted survival",
        ylabel="observed",
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
        aspect="equal",
    )
    axes.legend(title="calibration error", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _line(axes: Any, name: str, own: dict[str, Any], most: int, **style: Any) -> None:
    """Draw the bins of one depth, or of all; the fullest bin, of `most` drafts, is MOST_AREA."""
    predicted = [each["mean_predicted"] for each in own["bins"]]
    observed = [each["mean_observed"] for each in own["bins"]]
    areas = [MOST_AREA * each["count"] / most for each in own["bins"]]
    axes.plot(predicted, observed, label=f"{name}: {own['calibration_error']:.1%}", **style)
    axes.scatter(predicted, observed, s=areas, color=style["color"], alpha=0.5, linewidths=0)
