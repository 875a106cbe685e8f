"""One handover as a picture: what each process did, from the step of the prefill to the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.overlap.trace import Span, Trace

_ROWS = (  # label, part of the process's name, span, colour
    ("prefill: forward pass", "prefill", "step", "#2563c9"),
    ("prefill: gather and copy to the host", "prefill", "gather", "#178a6a"),
    ("prefill: lanes send", "prefill", "send", "#d9580d"),
    ("decode: lanes receive, verify", "decode", "recv", "#d9580d"),
    ("decode: copy to the GPU and scatter", "decode", "inject", "#178a6a"),
    ("decode: steps", "decode", "step", "#2563c9"),
)
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 900, 250, 20, 58, 34, 20
_STYLE = "font:12px system-ui,sans-serif;background:#fff"


def picture(trace: Trace, prefill_id: bytes, decode_id: bytes, title: str) -> str:
    """SVG from the start of the step with the first token to a few steps after the handover."""
    token, joined = trace.first_token[prefill_id], trace.joined[decode_id].at
    forward = max((s for s in _spans(trace, "prefill", "step") if s.end <= token + 1e-3), key=lambda s: s.end)
    begin = forward.start
    end = joined + max(0.2 * (joined - begin), 0.01)
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)

    def x(at: float) -> float:
        return _LEFT + (min(max(at, begin), end) - begin) * scale

    bottom = _TOP + len(_ROWS) * _ROW
    parts = [f'<text x="10" y="20" font-weight="600">{escape(title)}</text>']
    for number, (label, role, name, color) in enumerate(_ROWS):
        y = _TOP + number * _ROW
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        for span in _spans(trace, role, name):
            if span.end > begin and span.start < end:
                width = max(0.7, x(span.end) - x(span.start))
                parts.append(
                    f'<rect x="{x(span.start):.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" '
                    f'fill="{color}" fill-opacity="0.75" stroke="#fff" stroke-width="0.4"/>'
                )
    for at, label, level in ((token, "first token", 34), (joined, "joined the batch", 48)):
        parts.append(f'<path d="M{x(at):.1f} {level + 3}V{bottom}" stroke="#c62828" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{x(at) - 4:.1f}" y="{level}" text-anchor="end" fill="#c62828">{label}</text>')
    milliseconds = (end - begin) * 1e3
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000) if milliseconds / s <= 12)
    for tick in range(int(milliseconds / step) + 1):
        place = _LEFT + tick * step / 1e3 * scale
        parts.append(f'<path d="M{place:.1f} {bottom}v5" stroke="#5c6878"/>')
        parts.append(
            f'<text x="{place:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#5c6878">'
            f"{tick * step} ms</text>"
        )
    size = f'viewBox="0 0 {_WIDTH} {bottom + 28}" width="{_WIDTH}" height="{bottom + 28}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{_STYLE}">{"".join(parts)}</svg>\n'


def _spans(trace: Trace, role: str, name: str) -> Sequence[Span]:
    return [span for span in trace.spans if span.process.startswith(role) and span.name == name]
