//! Rows rounded as a store rounds them.

use burn::tensor::Tensor;

use super::RowFormat;
use crate::{
    SteGradient,
    functions::{fake_quantize_from, store},
};

impl RowFormat {
    /// Returns rows, `[batch, 1, rows, width]` in f32, as they are restored after they were stored.
    /// Gradients pass straight through.
    pub fn rounded(&self, rows: Tensor<4>) -> Tensor<4> {
        let width = rows.dims()[3];
        let Some(spec) = self.spec(width) else { return store(rows, self.float) };
        let coded = self.coded_channels(width);
        let quantize = |rows| fake_quantize_from(rows, spec, 0, SteGradient::Identity);
        if coded == width {
            return quantize(rows);
        }
        let rest = store(rows.clone().narrow(3, coded, width - coded), self.float);
        Tensor::cat(vec![quantize(rows.narrow(3, 0, coded)), rest], 3)
    }
}
