"""Model code: packed rows, packed attention, chunked log-probabilities and model building."""
