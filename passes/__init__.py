"""The compiler: pure functions from one type to the next. See `passes.pipeline`."""

AUTOPAR = True  # tells this package from another that a user may have named passes
