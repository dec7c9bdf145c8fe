"""Charts as data, drawn as inline SVG for a page (light and dark by its style sheet) and, by matplotlib, as PNG.

Standard library only, but for the PNG files.
"""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

# ----------------------------------------------------------------------------------------------------------------------
# Data

Points = list[tuple[float, float]]

# One a run, told apart by people who see no red or no green, on white and on black; then again with dashes.
COLORS = ("#0b62b5", "#c8440a", "#00825b", "#a0338d", "#9a6700", "#4b5563")
DARK_COLORS = ("#6cb6ff", "#ff8f5a", "#3fd0a0", "#e58fd3", "#e8b84a", "#b8c0ca")
DASHES = (("-", None), ("--", "7 3"), (":", "2 3"))  # as matplotlib and as SVG call them
MAX_POINTS = 600  # a line gets no more points than a chart has room for


@dataclass(frozen=True)
class Line:
    """Points of one run. `style` is thin, bold (a dot at each point) or bars; a NaN breaks a line and is marked by a cross.

    A line whose `label` is empty has no place in the legend.
    """

    label: str
    run: int
    points: Points
    style: str = "thin"

    @property
    def color(self) -> int:
        return self.run % len(COLORS)

    @property
    def dash(self) -> int:
        return self.run // len(COLORS) % len(DASHES)


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    note: str = ""  # what the legend has to explain beyond the lines' labels
    log: bool = False
    from_zero: bool = False

    @property
    def labelled(self) -> list[Line]:
        return [line for line in self.lines if line.label]


def thin_out(points: Points, limit: int = MAX_POINTS) -> Points:
    """At most about `limit` points: the lowest and the highest of each bucket, so that no spike is lost."""
    size = math.ceil(2 * len(points) / limit)
    if size <= 2:
        return points
    kept: Points = []
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        broken = [i for i in bucket if not math.isfinite(points[i][1])][:1]
        finite = [i for i in bucket if math.isfinite(points[i][1])]
        ends = [min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])] if finite else []
        kept += [points[i] for i in sorted({*broken, *ends})]
    return kept


# ----------------------------------------------------------------------------------------------------------------------
# Axes


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies on the axis: 0 at its low end, 1 at its high end."""
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (value - low) / (high - low)


def make_axis(values: Iterable[float], count: int, *, log: bool = False, from_zero: bool = False, pad: float = 0.0) -> Axis:
    """An axis over the finite values with about `count` round ticks. A log axis is over the positive ones."""
    usable = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    if log:
        low, high = min(usable) / 1.15, max(usable) * 1.15
        return Axis(low, high, log_ticks(low, high), log=True)
    low, high = min(usable), max(usable)
    low = min(low, 0.0) if from_zero else low
    margin = pad * (high - low) or (0.0 if high > low else abs(high) * 0.1 or 1.0)
    low, high = (low if from_zero or not margin else low - margin), high + margin
    return Axis(low, high, round_ticks(low, high, count))


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` multiples of 1, 2, 2.5 or 5 times a power of ten within [low, high]."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high]; with 2 and 5 times them where that leaves too few; every other one where too many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**e for e in exponents if low <= 10.0**e <= high]
    if len(powers) > 2:
        return powers[:: math.ceil(len(powers) / 6)]
    finer = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return finer if len(finer) > 2 else round_ticks(low, high, 4)


def label_ticks(ticks: list[float], title: str) -> tuple[list[str], str]:
    """Labels of the ticks, and the axis title, which takes the power of ten that small numbers share."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if not 0 < largest < 0.01:
        return [short(tick) for tick in ticks], title
    exponent = math.floor(math.log10(largest))
    return [f"{tick / 10.0**exponent:.3g}" for tick in ticks], f"{title} (\u00d7 1e{exponent})"


def short(value: float) -> str:
    """A number in few characters: `2500000` as `2.5M`."""
    for bound, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.4g}{unit}"
    return f"{value:.4g}"


# ----------------------------------------------------------------------------------------------------------------------
# HTML that cannot be injected into


class Markup(str):
    """Finished HTML. Every other string is text, and `tag` escapes it."""


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is the attribute class, `stroke_width` is stroke-width; an attribute of None is left out."""
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    head = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    return Markup(f"<{name}{head}>{join(children)}" + ("" if name == "meta" else f"</{name}>"))


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def escape(value: object) -> str:
    """Any value as text for HTML. Half surrogate pairs, which JSON can hold and UTF-8 cannot, become U+FFFD."""
    text = str(value).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return html.escape(text.replace("\0", "\ufffd"))


# ----------------------------------------------------------------------------------------------------------------------
# Charts as inline SVG

WIDTH, HEIGHT = 420, 270  # on a phone a unit is a little under a pixel
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 12, 44

STYLE = (
    """
figure { margin: 0; padding: 12px; background: var(--card); border-radius: 8px; min-width: 0; }
figure > svg { display: block; width: 100%; height: auto; }
figcaption { display: flex; flex-wrap: wrap; gap: .1em 1em; font-size: .82rem; color: var(--muted); margin-bottom: .3em; }
.key { display: inline-flex; align-items: center; gap: .4em; }
.swatch { width: 22px; height: 12px; flex: none; }
svg text { font-size: 13px; fill: var(--muted); }
svg .name { fill: var(--ink); }
svg path { fill: none; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--muted); }
.thin { stroke: var(--c); stroke-width: 1.3; stroke-linejoin: round; stroke-linecap: round; stroke-opacity: .75; }
.bold { stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dot { fill: var(--c); }
.bars { fill: var(--c); fill-opacity: .4; }
svg .cross { fill: var(--c); font-weight: bold; font-size: 16px; }
"""
    + "".join(f".c{i} {{ --c: {color}; }}\n" for i, color in enumerate(COLORS))
    + "@media (prefers-color-scheme: dark) {\n"
    + "".join(f"  .c{i} {{ --c: {color}; }}\n" for i, color in enumerate(DARK_COLORS))
    + "}\n"
)


def place(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    """A point in the drawing's coordinates, where y grows downwards."""
    across, up = x.share(point[0]), y.share(point[1])
    return round(LEFT + across * (WIDTH - LEFT - RIGHT), 1), round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1)


def css_of(line: Line, what: str) -> str:
    return f"{what} c{line.color}"


def drawable(point: tuple[float, float], log: bool) -> bool:
    return math.isfinite(point[1]) and (point[1] > 0 or not log)


def axes_of(chart: Chart) -> tuple[Axis, Axis]:
    points = [point for line in chart.lines for point in line.points]
    across = [x for x, _ in points]
    if any(line.style == "bars" for line in chart.lines):
        across += [min(across) - 1, max(across) + 1]
    x = make_axis(across, 6, from_zero=min(across) < 0.1 * max(across))  # lines that start at step 10 still show step 0
    return x, make_axis([y for _, y in points], 5, log=chart.log, from_zero=chart.from_zero, pad=0.05)


def draw_svg(chart: Chart) -> Markup:
    x, y = axes_of(chart)
    parts = [draw_axes(chart, x, y)]
    for line in sorted(chart.lines, key=lambda line: ("bars", "thin", "bold").index(line.style)):
        parts.append(draw_bars(line, x, y) if line.style == "bars" else draw_line(line, x, y))
    box = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *parts, viewBox=box, role="img", aria_label=f"{chart.title}: {chart.y_label} against {chart.x_label}")


def draw_axes(chart: Chart, x: Axis, y: Axis) -> Markup:
    """Grid, tick labels and axis titles."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    (x_texts, x_label), (y_texts, y_label) = label_ticks(x.ticks, chart.x_label), label_ticks(y.ticks, chart.y_label)
    for tick, label in zip(y.ticks, y_texts, strict=True):
        _, at = place(x, y, (x.low, tick))
        parts.append(tag("path", d=f"M{LEFT} {at}H{right}", class_="grid"))
        parts.append(tag("text", label, x=LEFT - 7, y=at + 4, text_anchor="end"))
    for tick, label in zip(x.ticks, x_texts, strict=True):
        at, _ = place(x, y, (tick, y.low))
        parts.append(tag("path", d=f"M{at} {bottom}v5", class_="axis"))
        parts.append(tag("text", label, x=at, y=bottom + 18, text_anchor="middle"))
    parts.append(tag("path", d=f"M{LEFT} {bottom}H{right}", class_="axis"))
    parts.append(tag("text", x_label, x=(LEFT + right) / 2, y=HEIGHT - 7, text_anchor="middle", class_="name"))
    middle = (TOP + bottom) / 2
    turned = f"translate(14 {middle}) rotate(-90)"
    parts.append(tag("text", y_label, transform=turned, text_anchor="middle", class_="name"))
    return join(parts)


def draw_line(line: Line, x: Axis, y: Axis) -> Markup:
    """A path broken where values are missing, a dot for each point of a bold line, a cross for each broken place."""
    path, pen_down = [], False
    points = thin_out(line.points)
    for point in points:
        if drawable(point, y.log):
            at = "{} {}".format(*place(x, y, point))
            path.append(f"L{at}" if pen_down else f"M{at}h0")  # h0: a lone point is still a dot
        pen_down = drawable(point, y.log)
    parts = [tag("path", d="".join(path), class_=css_of(line, line.style), stroke_dasharray=DASHES[line.dash][1])]
    if line.style == "bold":
        parts += [draw_dot(line, point, x, y) for point in points if drawable(point, y.log)]
    parts += [draw_cross(line, point, x, y) for point in points if not math.isfinite(point[1])]
    return join(parts)


def draw_dot(line: Line, point: tuple[float, float], x: Axis, y: Axis) -> Markup:
    cx, cy = place(x, y, point)
    words = tag("title", f"{line.label}: {point[1]:.4f} at {short(point[0])}")
    return tag("circle", words, cx=cx, cy=cy, r=2.2, class_=css_of(line, "dot"))


def draw_cross(line: Line, point: tuple[float, float], x: Axis, y: Axis) -> Markup:
    at, _ = place(x, y, (point[0], y.low))
    words = tag("title", f"not a finite number at {short(point[0])}")
    return tag("text", words, "\u00d7", x=at, y=TOP + 8, text_anchor="middle", class_=css_of(line, "cross"))


def draw_bars(line: Line, x: Axis, y: Axis) -> Markup:
    parts = []
    for point in line.points:
        left, top = place(x, y, (point[0] - 0.4, point[1]))
        right, bottom = place(x, y, (point[0] + 0.4, y.low))
        words = tag("title", f"{point[0]:g}: {point[1]:.2f} %")
        size = {"width": round(right - left, 1), "height": round(bottom - top, 1)}
        parts.append(tag("rect", words, x=left, y=top, **size, class_=css_of(line, "bars")))
    return join(parts)


def draw_legend(chart: Chart) -> Markup:
    """Nothing for a single line: the chart's title says what it is."""
    if len(chart.lines) == 1:
        return Markup()
    keys = [tag("span", draw_swatch(line), tag("bdi", line.label), class_="key") for line in chart.labelled]
    return tag("figcaption", *keys, tag("span", chart.note))


def draw_swatch(line: Line) -> Markup:
    """A short piece of the line as the chart shows it."""
    parts = [tag("path", d="M1 6H21", class_=css_of(line, line.style), stroke_dasharray=DASHES[line.dash][1])]
    if line.style == "bars":
        parts = [tag("rect", x=3, y=1, width=16, height=10, class_=css_of(line, "bars"))]
    elif line.style == "bold":
        parts.append(tag("circle", cx=11, cy=6, r=3, class_=css_of(line, "dot")))
    return tag("svg", *parts, viewBox="0 0 22 12", class_="swatch", aria_hidden="true")


def draw_figure(chart: Chart) -> Markup:
    """The chart as an element for a page that has STYLE, and defines its variables card, ink, muted and grid."""
    return tag("figure", tag("h3", chart.title), draw_legend(chart), draw_svg(chart), id=chart.name)


# ----------------------------------------------------------------------------------------------------------------------
# PNG files


def draw_png(chart: Chart, file: IO[bytes]) -> None:
    """The chart as a PNG file, on white. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.3), dpi=130, layout="constrained")
    plot(chart, figure.add_subplot())
    figure.savefig(file, format="png")


def plot(chart: Chart, axes: Any) -> None:
    """Draws the chart on matplotlib's `axes`, with the same ranges and ticks as the SVG."""
    x, y = axes_of(chart)
    handles = [plot_line(line, axes) for line in chart.lines]
    shown = [handle for line, handle in zip(chart.lines, handles, strict=True) if line.label]
    axes.set(title=chart.title, yscale="log" if chart.log else "linear", xlim=(x.low, x.high), ylim=(y.low, y.high))
    for axis, ticks, title in ((axes.xaxis, x.ticks, chart.x_label), (axes.yaxis, y.ticks, chart.y_label)):
        texts, title = label_ticks(ticks, title)
        axis.set_ticks(ticks, texts)
        axis.set_label_text(title)
        axis.set_ticks([], minor=True)
    axes.grid(axis="y", alpha=0.3)
    if len(handles) > 1:
        legend = axes.legend(
            shown, [line.label for line in chart.labelled], title=chart.note or None, fontsize=8, title_fontsize=8
        )
        for text in legend.get_texts():
            text.set_parse_math(False)  # a run's name may hold a dollar sign


def plot_line(line: Line, axes: Any) -> Any:
    """Draws one line and returns what stands for it in the legend."""
    xs, ys = zip(*thin_out(line.points), strict=True)
    color, dash = COLORS[line.color], DASHES[line.dash][0]
    if line.style == "bars":
        return axes.bar(xs, ys, color=color, alpha=0.4)
    broken = [a for a, b in line.points if not math.isfinite(b)]
    axes.plot(broken, [0.97] * len(broken), "x", color=color, transform=axes.get_xaxis_transform())
    if line.style == "bold":
        return axes.plot(xs, ys, dash, color=color, marker="o", markersize=3.5, linewidth=2)[0]
    return axes.plot(xs, ys, dash, color=color, linewidth=1, alpha=0.75)[0]
