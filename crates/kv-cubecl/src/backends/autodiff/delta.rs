//! [`DeltaOps`] without gradients: the state is not part of the graph. Training computes whole
//! sequences of Burn's operations.

use burn::backend::tensor::FloatTensor;
use burn_autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};

use super::constant;
use crate::{
    TokenPosition,
    delta::{DeltaConfig, DeltaOps, DeltaStore, StepInputs, StepWeights},
};

impl<B: DeltaOps, C: CheckpointStrategy> DeltaOps for Autodiff<B, C> {
    fn delta_step(
        store: DeltaStore<Self>,
        inputs: StepInputs<Self>,
        weights: StepWeights<Self>,
        config: DeltaConfig,
        epsilon: f64,
    ) -> (DeltaStore<Self>, FloatTensor<Self>) {
        let DeltaStore { conv, state } = store;
        let store = DeltaStore { conv: conv.into_primitive(), state: state.into_primitive() };
        let StepInputs { mixed, rates, position } = inputs;
        let position = position.into_option().map_or(TokenPosition::Counted, TokenPosition::Stored);
        let (mixed, rates) = (mixed.into_primitive(), rates.into_primitive());
        let inputs = StepInputs { mixed, rates, position };
        let StepWeights { conv, log_rate, time_bias, gain } = weights;
        let [conv, log_rate, time_bias, gain] =
            [conv, log_rate, time_bias, gain].map(|tensor| tensor.into_primitive());
        let weights = StepWeights { conv, log_rate, time_bias, gain };
        let (DeltaStore { conv, state }, output) =
            <B as DeltaOps>::delta_step(store, inputs, weights, config, epsilon);
        let (wrap, output) = (constant::<B, C>, constant::<B, C>(output));
        (DeltaStore { conv: wrap(conv), state: wrap(state) }, output)
    }
}
