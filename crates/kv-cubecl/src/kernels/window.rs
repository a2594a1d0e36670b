//! The arithmetic of [`Window`] for kernels: how many keys and values of a cache are quantized.

use cubecl::prelude::*;

use crate::{Flush, layout::Window};

/// Run-time numbers of a [`Window`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WindowArgs {
    pub(crate) sinks: usize,
    residual_length: usize,
    /// Tokens that quantization lags behind: 0 if it precedes attention, 1 if it follows.
    lag: usize,
    /// 1 if keys are quantized, else 0.
    keys: usize,
    /// 1 if values are quantized, else 0.
    values: usize,
}

impl Window {
    pub(crate) fn args(&self) -> WindowArgsLaunch {
        WindowArgsLaunch::new(
            self.sink_tokens,
            self.residual_length.max(1),
            usize::from(self.flush == Flush::AfterAttention),
            usize::from(self.keys),
            usize::from(self.values),
        )
    }
}

/// Number of tokens after the sinks that quantization has seen in a cache of `len` tokens.
#[cube]
fn seen(len: usize, window: &WindowArgs) -> usize {
    let skipped = window.sinks + window.lag;
    let mut seen = 0usize;
    if len > skipped {
        seen = len - skipped;
    }
    seen
}

/// [`QuantizedCounts::keys`](crate::QuantizedCounts::keys) in a cache of `len` tokens.
#[cube]
pub(crate) fn quantized_keys(len: usize, window: &WindowArgs) -> usize {
    let r = window.residual_length;
    seen(len, window) / r * r * window.keys
}

/// [`QuantizedCounts::values`](crate::QuantizedCounts::values) in a cache of `len` tokens.
#[cube]
pub(crate) fn quantized_values(len: usize, window: &WindowArgs) -> usize {
    let seen = seen(len, window);
    let mut count = 0usize;
    if seen > window.residual_length {
        count = (seen - window.residual_length) * window.values;
    }
    count
}
