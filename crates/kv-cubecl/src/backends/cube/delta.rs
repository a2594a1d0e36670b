//! One step of the gated delta rule: Burn's tensors bound to the kernels.

use burn::{backend::tensor::FloatTensor, tensor::DType};
use burn_cubecl::{CubeBackend, kernel::into_contiguous};

use super::tensors::{arg, empty_like, launched, writable};
use crate::{
    delta::{DeltaConfig, DeltaOps, DeltaStore, StepInputs, StepWeights},
    kernels::delta::{ConvolveBindings, UpdateBindings, launch_convolve, launch_update},
};

impl DeltaOps for CubeBackend {
    fn delta_step(
        store: DeltaStore<Self>,
        inputs: StepInputs<Self>,
        weights: StepWeights<Self>,
        config: DeltaConfig,
        epsilon: f64,
    ) -> (DeltaStore<Self>, FloatTensor<Self>) {
        let [conv, state] = [store.conv, store.state].map(|x| writable(into_contiguous(x)));
        let [mixed, rates] = [inputs.mixed, inputs.rates].map(into_contiguous);
        let position = inputs.position.into_option().map(into_contiguous);
        let StepWeights { conv: kernel, log_rate, time_bias, gain } = weights;
        let [kernel, log_rate, time_bias, gain] =
            [kernel, log_rate, time_bias, gain].map(into_contiguous);
        let [batch, tokens, _]: [usize; 3] = mixed.meta.shape().dims();
        assert_eq!(tokens, 1, "the kernels take one token");
        let positions =
            || position.as_ref().map(|position| (arg(position), position.meta.num_elements()));
        let width = config.conv_channels() + 2 * config.n_value_heads;
        let convolved = empty_like(&mixed, [batch, width], DType::F32);
        let output = empty_like(&mixed, [batch, 1, config.value_channels()], DType::F32);
        let bindings = ConvolveBindings {
            mixed: arg(&mixed),
            rates: arg(&rates),
            kernel: arg(&kernel),
            log_rate: arg(&log_rate),
            time_bias: arg(&time_bias),
            earlier: arg(&conv),
            output: arg(&convolved),
            positions: positions(),
        };
        launched(launch_convolve(&mixed.client, bindings, &config, batch));
        let bindings = UpdateBindings {
            convolved: arg(&convolved),
            mixed: arg(&mixed),
            gain: arg(&gain),
            state: arg(&state),
            output: arg(&output),
            positions: positions(),
        };
        launched(launch_update(&mixed.client, bindings, &config, batch, epsilon));
        (DeltaStore { conv, state }, output)
    }
}
