"""What the steps of an engine cost, and how that is learned. Pure.

`step_model` has the costs, `measured_steps` measures them at the start, `learned_steps` learns and corrects
them while requests are served. `averages` has what work has cost lately, `quantiles` what a quantile is.
"""
