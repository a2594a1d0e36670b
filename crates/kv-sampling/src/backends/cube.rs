use burn::backend::tensor::{FloatTensor, IntTensor};
use burn_cubecl::{
    CubeBackend, cubecl::prelude::BufferArg, kernel::into_contiguous, tensor::CubeTensor,
};

use crate::{
    CursorState, Draw, SamplingOps,
    kernel::{self, Bindings},
};

impl SamplingOps for CubeBackend {
    fn advance(
        logits: FloatTensor<Self>,
        state: CursorState<Self>,
        ends: IntTensor<Self>,
        past: usize,
        draw: Draw,
    ) -> CursorState<Self> {
        let (logits, ends) = (into_contiguous(logits), into_contiguous(ends));
        let CursorState { ids, position, broken } = state;
        let [ids, position, broken] = [ids, position, broken].map(writable);
        let [texts, vocab] = logits.meta.shape().dims();
        let bindings = Bindings {
            logits: arg(&logits),
            ends: (arg(&ends), ends.meta.shape().num_elements()),
            ids: arg(&ids),
            position: arg(&position),
            broken: arg(&broken),
        };
        kernel::launch(&logits.client, bindings, [texts, vocab], past, &draw);
        CursorState { ids, position, broken }
    }
}

fn arg(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// Returns the tensor itself if nothing else holds it, else a copy, so a write in place is safe.
fn writable(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    if tensor.can_mut() { tensor } else { tensor.copy() }
}
