"""Training loops: `autopar run`, its data, and the single device beside it."""
