"""Which engine process of a worker follows which. Pure: the service process tells what has happened.

```
starting ─ready─▶ serving ─ended, restart─▶ taking over ─ready─▶ on trial ─computed─▶ serving
                                             │ no standby, ended ▲
                                             ▼                   │ ready
                                         starting alone ─────────┘
on trial ─restart─▶ taking over            starting, starting alone, on trial ─ended─▶ over
```

Each engine process begins with what is there: weights, KV with its records, and open attempts. The first one
finds nothing. A standby has loaded the weights before; an engine process that starts alone follows if there
is none, or if it ends before it serves. A process that ends before it has computed a token would likely end
again, unless it has lived for long or was asked to end.
"""

from typing import Literal

Phase = Literal["starting", "serving", "taking over", "starting alone", "on trial", "over"]
Event = Literal["ready", "computed", "ended", "restart", "no standby", "failed"]
"""`computed`: a token, or it has lived for long, or it was asked for by a restart. `ended`: an engine process
has ended that another one can follow. `failed`: none can."""

TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    ("starting", "ready"): "serving",
    ("starting", "ended"): "over",
    ("starting", "failed"): "over",
    ("serving", "ready"): "serving",  # it has computed a token before it had all attempts
    ("serving", "computed"): "serving",
    ("serving", "ended"): "taking over",
    ("serving", "restart"): "taking over",
    ("serving", "failed"): "over",
    ("taking over", "no standby"): "starting alone",
    ("taking over", "ready"): "on trial",
    ("taking over", "computed"): "serving",
    ("taking over", "ended"): "starting alone",
    ("taking over", "failed"): "starting alone",
    ("starting alone", "ready"): "on trial",
    ("starting alone", "computed"): "serving",
    ("starting alone", "ended"): "over",
    ("starting alone", "failed"): "over",
    ("on trial", "computed"): "serving",
    ("on trial", "ended"): "over",
    ("on trial", "restart"): "taking over",
    ("on trial", "failed"): "over",
}
"""Other events cannot come in a phase. A restart that is asked for before an engine process serves is the
replacement that is under way."""
