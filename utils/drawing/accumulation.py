"""Drawings of gradient accumulation: what a step does over time, and what memory holds."""

from utils.drawing import figures

STATE = 3.0  # parameters, gradients and optimizer state, in units of one micro-batch's activations
FORWARD, BACKWARD, STEP = 1.0, 2.0, 1.0  # durations; a backward pass takes about two forwards


def accumulation(micro_batches: int = 4) -> None:
    """One step drawn twice: the whole batch, and in micro-batches. A sketch, not a measurement."""
    _, panels = figures.plt.subplots(1, 2, figsize=figures.SIZES["normal"], sharey=True)
    whole, pieces = panels
    _step(whole, 1, micro_batches)
    _step(pieces, micro_batches, 1)
    whole.set(title="the whole batch at once", ylabel="memory")
    pieces.set(title=f"{micro_batches} micro-batches in turn")
    pieces.legend(loc="upper right", fontsize=10)
    figures.show()


def teeth(micro_batches: int, size: float) -> tuple[list[float], list[float]]:
    """(times, activation heights) of `micro_batches` passes, each `size` micro-batches large."""
    times, heights = [0.0], [0.0]
    for _ in range(micro_batches):
        for seconds, height in ((FORWARD, size), (BACKWARD, 0.0)):
            times.append(times[-1] + seconds * size)
            heights.append(height)
    return times, heights


def _step(axes, micro_batches: int, size: float) -> None:
    times, heights = teeth(micro_batches, size)
    end = times[-1] + STEP
    axes.fill_between([0, end], STATE, color=figures.shade("optimizer"), alpha=0.35, linewidth=0,
                      label="parameters, gradients, optimizer")
    axes.fill_between(times, STATE, [STATE + height for height in heights],
                      color=figures.shade("activations"), linewidth=0,
                      label="activations")
    for row in range(micro_batches):
        start = times[2 * row]
        middle = start + FORWARD * size
        _bar(axes, start, middle, "forward", "data")
        _bar(axes, middle, times[2 * row + 2], "backward", "compute")
    _bar(axes, times[-1], end, "step", "gold")
    axes.set(xlim=(0, end), ylim=(-1.3, 8.2), xlabel="time", xticks=[], yticks=[])
    axes.grid(visible=False)


def _bar(axes, start: float, end: float, text: str, color: str) -> None:
    """One pass on the lane below the memory; a short one shows only its first letter."""
    axes.barh(-0.75, end - start, 0.8, left=start, color=figures.shade(color), edgecolor="white")
    word = text if end - start > 2.5 else text[0].upper()
    axes.text((start + end) / 2, -0.75, word, ha="center", va="center", fontsize=9,
              color="white" if color != "data" else figures.INK)
