//! MLPs by the names of their projections.

use super::{LayerSource, LayerVisitor};
use crate::{
    decoder::Role,
    error::Result,
    nn::{GatedMlp, Gating},
};

/// The gate, up and output projection of an MLP in the files of most families.
pub(crate) const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

impl LayerSource<'_> {
    /// Builds an MLP of the width `wide` by the names of its projections.
    pub(crate) fn mlp(
        &mut self,
        names: &[impl AsRef<str>; 3],
        [width, wide]: [usize; 2],
        gating: Gating,
    ) -> Result<GatedMlp> {
        let [gate, up, down] = names.each_ref().map(AsRef::as_ref);
        Ok(GatedMlp {
            gate_up: self.fused(&[(gate, wide), (up, wide)], width, false)?,
            down: self.residual(down, [width, wide], false)?,
            gating,
        })
    }
}

impl LayerVisitor<'_> {
    /// Visits an MLP by the names of its projections.
    pub(crate) fn mlp(&mut self, names: &[impl AsRef<str>; 3], mlp: &GatedMlp) {
        let [gate, up, down] = names.each_ref().map(AsRef::as_ref);
        let wide = mlp.down.weight.dims()[1];
        self.fused(Role::Mlp, &[(gate, wide), (up, wide)], &mlp.gate_up);
        self.linear(Role::Mlp, down, &mlp.down);
    }
}
