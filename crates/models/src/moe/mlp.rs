//! MLPs by the names of their projections.

use crate::{
    decoder::Role,
    error::Result,
    nn::{GatedMlp, Gating},
    stack::{LayerSource, LayerVisitor},
};

/// The gate, up and output projection of an MLP.
pub(super) const MLP_PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Builds an MLP of the width `wide` by the names of its projections.
pub(super) fn build(
    [gate, up, down]: &[String; 3],
    [width, wide]: [usize; 2],
    source: &mut LayerSource<'_>,
) -> Result<GatedMlp> {
    Ok(GatedMlp {
        gate_up: source.fused(&[(gate, wide), (up, wide)], width, false)?,
        down: source.residual(down, [width, wide], false)?,
        gating: Gating::Silu,
    })
}

/// Visits an MLP by the names of its projections.
pub(super) fn visit(
    [gate, up, down]: &[String; 3],
    mlp: &GatedMlp,
    visitor: &mut LayerVisitor<'_>,
) {
    let wide = mlp.down.weight.dims()[1];
    visitor.fused(Role::Mlp, &[(gate, wide), (up, wide)], &mlp.gate_up);
    visitor.linear(Role::Mlp, down, &mlp.down);
}
