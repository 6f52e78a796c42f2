"""Whether a result is right: float64 oracles, tolerances, and a judge per operator."""
