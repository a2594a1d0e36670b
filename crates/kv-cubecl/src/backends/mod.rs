//! `KvCacheOps` for each of Burn's backends.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "remote")]
pub(crate) mod remote;
mod sinks;

use burn::tensor::Device;
use kv_device::Backends;
#[cfg(feature = "cube")]
use kv_device::client;

use crate::{
    Error, Result,
    delta::DeltaConfig,
    layout::{CacheLayout, CacheShape, StreamSpec},
};

const BACKENDS: Backends = Backends {
    crate_name: "kv-cubecl",
    flex: cfg!(feature = "flex"),
    cube: cfg!(feature = "cube"),
    autodiff: cfg!(feature = "autodiff"),
    remote: cfg!(feature = "remote"),
};

/// Checks that this crate's features give `device` its operations.
///
/// # Errors
/// [`Error::Unsupported`] naming `op`.
pub(crate) fn check_device(op: &str, device: &Device) -> Result<()> {
    Ok(BACKENDS.check(op, device)?)
}

/// Checks that `device` has enough cubes and wide enough indices for the kernels of `op`, which
/// have up to a unit for each element of a tensor of this shape.
///
/// # Errors
/// [`Error::Unsupported`] naming `op`.
#[allow(unused_variables, reason = "without a CubeCL backend there is nothing to refuse")]
pub(crate) fn check_elements(op: &str, shape: [usize; 4], device: &Device) -> Result<()> {
    #[cfg(feature = "cube")]
    if let Some(client) = client(device) {
        use crate::kernels::{Grid, Limits};
        let n = shape.iter().product();
        Grid::elementwise(op, n, n, &Limits::of(client.properties()))?;
    }
    Ok(())
}

/// Checks that `device` has enough cubes and wide enough indices for `streaming_attention` of
/// `tokens` tokens and, if it records gradients, for the backward pass.
///
/// # Errors
/// [`Error::Unsupported`].
#[allow(unused_variables, reason = "without a CubeCL backend there is nothing to refuse")]
pub(crate) fn check_stream(
    n_heads: usize,
    shape: CacheShape,
    tokens: usize,
    spec: StreamSpec,
    device: &Device,
) -> Result<()> {
    #[cfg(feature = "cube")]
    if let Some(client) = client(device) {
        let options = crate::AttentionOptions::default();
        let problem = cube::stream_problem([n_heads, tokens], shape, tokens, spec, options);
        return problem.check(device.is_autodiff(), client.properties());
    }
    Ok(())
}

/// Checks that `device` has enough cubes and wide enough indices for a query of this shape to
/// attend to a cache of `len` tokens, which include the tokens of the query.
///
/// # Errors
/// [`Error::Unsupported`].
#[allow(unused_variables, reason = "without a CubeCL backend there is nothing to refuse")]
pub(crate) fn check_attend(
    layout: &CacheLayout,
    query: [usize; 4],
    len: usize,
    device: &Device,
) -> Result<()> {
    // Small queries, such as those of decode steps, skip the check: every device can index them and
    // all that is computed from them.
    #[cfg(feature = "cube")]
    if query.iter().product::<usize>() > 1 << 20
        && let Some(client) = client(device)
    {
        let [_, n_heads, tokens, _] = query;
        let schedule = layout.schedule();
        let spec = StreamSpec { schedule, first_query: len - tokens, first_key: 0 };
        let options = crate::AttentionOptions::default();
        let problem = cube::stream_problem([n_heads, tokens], layout.shape(), len, spec, options);
        problem.check(false, client.properties())?;
        return cube::check_decode(layout, query, len, client.properties());
    }
    Ok(())
}

/// Returns whether [`DeltaOps::delta_step`](crate::delta::DeltaOps::delta_step) takes many tokens
/// on `device`, which the CPU's own caches make as fast as products of matrices. A remote device
/// may be a GPU.
#[allow(unused_variables, reason = "without a CubeCL backend every device is the CPU")]
pub(crate) fn steps_many_tokens(device: &Device) -> bool {
    if kv_device::is_remote(device) {
        return false;
    }
    #[cfg(feature = "cube")]
    return client(device).is_none();
    #[cfg(not(feature = "cube"))]
    true
}

/// Checks that `device` can step `batch` states of `config`.
///
/// # Errors
/// [`Error::Unsupported`] naming the limit.
#[allow(unused_variables, reason = "without a CubeCL backend there is nothing to refuse")]
pub(crate) fn check_delta(config: &DeltaConfig, batch: usize, device: &Device) -> Result<()> {
    #[cfg(feature = "cube")]
    if let Some(client) = client(device) {
        crate::kernels::delta::check(&client, config, batch)?;
    }
    Ok(())
}

/// Checks that the backend of `device` can serve a cache of `layout`: operations, float type, and
/// limits of the kernels.
///
/// # Errors
/// [`Error::Unsupported`] naming `op` or the limit.
pub(crate) fn check(op: &str, layout: &CacheLayout, device: &Device) -> Result<()> {
    check_device(op, device)?;
    let float = layout.config().float;
    if !device.clone().without_autodiff().supports_dtype(float.dtype()) {
        return Err(Error::Unsupported {
            what: format!("{op} of {} on {device:?}", layout.config()),
            why: format!("the device has no {}; keep the residual in f32", float.name()),
        });
    }
    #[cfg(feature = "cube")]
    if client(device).is_some() {
        match layout.shape().shares_values {
            true => crate::kernels::shared_attention::check(layout)?,
            false => crate::kernels::decode_attention::check(layout)?,
        }
    }
    Ok(())
}
