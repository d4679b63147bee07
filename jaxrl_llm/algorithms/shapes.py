"""Shapes of what losses and estimators take: B samples with R tokens of a response each."""

from jaxtyping import Array, Float, Int

Tokens = Float[Array, "B R"]
Samples = Float[Array, " B"]
Scalar = Float[Array, ""]
TokenIds = Int[Array, "B R"]
SampleIds = Int[Array, " B"]
