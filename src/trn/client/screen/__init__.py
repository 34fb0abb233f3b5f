"""What a terminal shows of a run: state, curve, log, figures."""
