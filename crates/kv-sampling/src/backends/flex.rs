use burn::{
    backend::{
        Flex,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Shape, TensorData},
};
use burn_flex::FlexTensor;

use crate::{CursorState, Draw, SamplingOps, host::pick};

impl SamplingOps for Flex {
    fn advance(
        logits: FloatTensor<Self>,
        state: CursorState<Self>,
        ends: IntTensor<Self>,
        past: usize,
        draw: Draw,
    ) -> CursorState<Self> {
        let logits = logits.to_contiguous();
        let [texts, vocab]: [usize; 2] = logits.layout().shape().dims();
        let ends = ends.to_contiguous();
        let [position, mut broken] =
            [&state.position, &state.broken].map(|one| one.to_contiguous().storage::<i32>()[0]);
        let rows = logits.storage::<f32>().chunks_exact(vocab).take(texts);
        let picked = rows.zip(0..).map(|(row, sequence)| {
            pick(row, &draw, sequence, position as u32).unwrap_or_else(|| {
                broken += 1;
                0
            }) as i32
        });
        let ids: Vec<i32> = picked.collect();
        let ended = ids.iter().any(|id| ends.storage::<i32>().contains(id));
        let position = position + 1 + if ended { past as i32 } else { 0 };
        CursorState {
            ids: tensor(ids, [texts, 1]),
            position: tensor(vec![position], [1]),
            broken: tensor(vec![broken], [1]),
        }
    }
}

fn tensor(values: Vec<i32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.into()))
}
