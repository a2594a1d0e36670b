//! The tensors of experts in GGUF files for tests.

use std::collections::BTreeMap;

use super::{
    GgmlType, GgufTensor,
    gguf::{gguf_name, transposed},
};

/// The matrices of all experts of each layer and projection. GGUF files have one tensor for them,
/// Hugging Face folders of Qwen3-MoE and Mixtral one for each expert.
#[derive(Default)]
pub(super) struct Stacks(BTreeMap<String, Stack>);

#[derive(Default)]
struct Stack {
    matrix: Vec<usize>,
    values: Vec<f32>,
}

impl Stacks {
    /// Adds a matrix of one expert, `model.layers.L.mlp.experts.E.PART_proj.weight` or
    /// `model.layers.L.block_sparse_moe.experts.E.PART.weight`.
    pub(super) fn add(&mut self, name: &str, shape: Vec<usize>, values: &[f32]) {
        let (block, expert) = name.split_once(".experts.").unwrap();
        let (layer, _) = block.rsplit_once('.').unwrap();
        let (number, part) = expert.split_once('.').unwrap();
        let number: usize = number.parse().unwrap();
        let part = match part {
            "gate_proj.weight" | "w1.weight" => "gate",
            "up_proj.weight" | "w3.weight" => "up",
            "down_proj.weight" | "w2.weight" => "down",
            other => panic!("{name}: {other}"),
        };
        let name = format!("{}.ffn_{part}_exps.weight", gguf_name("qwen3moe", layer));
        let stack = self.0.entry(name).or_default();
        stack.matrix = shape;
        stack.values.resize(stack.values.len().max((number + 1) * values.len()), f32::NAN);
        stack.values[number * values.len()..][..values.len()].copy_from_slice(values);
    }

    /// Returns the tensors, in `dtype` where rows are whole blocks.
    pub(super) fn tensors(self, dtype: GgmlType) -> impl Iterator<Item = GgufTensor> {
        self.0.into_iter().map(move |(name, Stack { matrix, values })| {
            let experts = values.len() / matrix.iter().product::<usize>();
            let fits = matrix[1].is_multiple_of(dtype.block_size());
            let dtype = if fits { dtype } else { GgmlType::F32 };
            GgufTensor::new(name, &[&[experts], &matrix[..]].concat(), &values, dtype)
        })
    }
}

/// gpt-oss alternates gate and up rows of its experts in one transposed tensor. GGUF files have two
/// tensors.
pub(super) fn expert_tensors(
    name: &str,
    shape: &[usize],
    values: &[f32],
    dtype: GgmlType,
) -> Vec<GgufTensor> {
    let is_bias = name.ends_with("_bias");
    // [experts, columns, rows] -> [experts, rows, columns]; a bias is one column.
    let (experts, rows) = (shape[0], *shape.last().unwrap());
    let columns = if is_bias { 1 } else { shape[1] };
    let values: Vec<f32> =
        values.chunks(columns * rows).flat_map(|expert| transposed(expert, rows)).collect();
    let tensor = |name: String, rows: usize, values: &[f32]| {
        let (shape, dtype) = match is_bias {
            true => (vec![experts, rows], GgmlType::F32),
            false => (vec![experts, rows, columns], dtype),
        };
        GgufTensor::new(name, &shape, values, dtype)
    };
    let gguf = gguf_name("gpt-oss", name);
    if !gguf.contains("gate_up_proj") {
        return vec![tensor(gguf, rows, &values)];
    }
    let (layer, _) = gguf.split_once(".mlp").unwrap();
    let suffix = if is_bias { "bias" } else { "weight" };
    let parts = ["gate", "up"].into_iter().enumerate().map(|(i, part)| {
        let rows_of_part = values.chunks(columns).skip(i).step_by(2);
        let values: Vec<f32> = rows_of_part.flatten().copied().collect();
        tensor(format!("{layer}.ffn_{part}_exps.{suffix}"), rows / 2, &values)
    });
    parts.collect()
}
