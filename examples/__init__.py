"""Programs that use autopar; the wheel ships this folder as `autopar.examples`."""
