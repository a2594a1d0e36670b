//! The part of a layer after attention: experts, or an MLP.

use burn::tensor::Tensor;

use super::{
    config::{ExpertNames, ExpertsConfig},
    experts::Experts,
};
use crate::{
    error::Result,
    nn::{GatedMlp, Gating, Linear, RmsNorm, by_rows},
    stack::{LayerSource, LayerVisitor, MLP},
};

/// The MLP of a layer, or the experts that replace it. The fields of layers stay apart, because
/// checkpoints of training runs contain their names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FeedForward<'a> {
    pub(crate) mlp: &'a Option<GatedMlp>,
    pub(crate) experts: &'a Option<Experts>,
}

impl FeedForward<'_> {
    /// Builds the `experts`, or without them an MLP of the width `wide`.
    pub(crate) fn build(
        experts: Option<ExpertsConfig>,
        [width, wide]: [usize; 2],
        names: &ExpertNames,
        source: &mut LayerSource<'_>,
    ) -> Result<(Option<GatedMlp>, Option<Experts>)> {
        Ok(match experts {
            Some(experts) => (None, Some(Experts::build(experts, width, names, source)?)),
            None => (Some(source.mlp(&MLP, [width, wide], Gating::Silu)?), None),
        })
    }

    pub(crate) fn visit(self, names: &ExpertNames, visitor: &mut LayerVisitor<'_>) {
        if let Some(mlp) = self.mlp {
            visitor.mlp(&MLP, mlp);
        }
        if let Some(experts) = self.experts {
            experts.visit(names, visitor);
        }
    }

    /// Adds to `x` the result for its `norm`. `captured` is true if the host must not read which
    /// experts the router selects.
    pub(crate) fn forward_added(self, x: Tensor<3>, norm: &RmsNorm, captured: bool) -> Tensor<3> {
        if let Some(mlp) = self.mlp {
            return by_rows(x, |x| mlp.forward_added(x, norm));
        }
        let normed = by_rows(x.clone(), |x| norm.forward(x));
        match self.experts {
            Some(experts) => x + experts.forward(normed, captured),
            None => x,
        }
    }

    /// Returns whether there are no experts, or they are in one buffer. Otherwise a step for graph
    /// capture multiplies with all experts, because the host cannot read which ones the router
    /// selected.
    pub(crate) fn captures(self) -> bool {
        self.experts.as_ref().is_none_or(|experts| experts.stacks.is_some())
    }

    /// Returns the projections that training can put adapters on.
    pub(crate) fn projections<'a>(
        mlp: &'a mut Option<GatedMlp>,
        experts: &'a mut Option<Experts>,
    ) -> impl Iterator<Item = &'a mut Linear> {
        let experts = experts.iter_mut().flat_map(Experts::mlps);
        mlp.iter_mut().chain(experts).flat_map(|mlp| [&mut mlp.gate_up, &mut mlp.down])
    }
}
