//! Layers of the gated delta rule in GGUF files, as llama.cpp's converter writes them.

use serde_json::Value as Json;

/// The sizes of a configuration.
struct Sizes {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
}

impl Sizes {
    fn of(config: &Json) -> Self {
        let int = |key: &str| config[key].as_u64().unwrap() as usize;
        Self {
            key_heads: int("linear_num_key_heads"),
            value_heads: int("linear_num_value_heads"),
            key_dim: int("linear_key_head_dim"),
            value_dim: int("linear_value_head_dim"),
        }
    }

    /// Reorders blocks of `len` numbers, one for each value head. In Hugging Face files, the value
    /// heads of a key head are adjacent; in GGUF files, those with the same place among them are.
    fn tiled(&self, values: &[f32], len: usize) -> Vec<f32> {
        let per_key = self.value_heads / self.key_heads;
        let head = |at: usize| at % self.key_heads * per_key + at / self.key_heads;
        (0..self.value_heads).flat_map(|at| values[head(at) * len..][..len].to_vec()).collect()
    }
}

/// Returns the metadata of the layers.
pub(super) fn sizes(config: &Json) -> Vec<(&'static str, u32)> {
    let Sizes { key_heads, value_heads, key_dim, value_dim } = Sizes::of(config);
    let kinds = config["layer_types"].as_array().unwrap();
    let interval = 1 + kinds.iter().position(|kind| kind == "full_attention").unwrap();
    let conv = config["linear_conv_kernel_dim"].as_u64().unwrap() as u32;
    vec![
        ("ssm.conv_kernel", conv),
        ("ssm.state_size", key_dim as u32),
        ("ssm.group_count", key_heads as u32),
        ("ssm.time_step_rank", value_heads as u32),
        ("ssm.inner_size", (value_heads * value_dim) as u32),
        ("full_attention_interval", interval as u32),
    ]
}

/// Returns shape and numbers of a tensor in the file.
pub(super) fn converted(
    gguf: &str,
    shape: Vec<usize>,
    mut values: Vec<f32>,
    config: &Json,
) -> (Vec<usize>, Vec<f32>) {
    let sizes = Sizes::of(config);
    let row = shape.iter().skip(1).product();
    let stem = gguf.rsplit_once("ssm_").map(|(_, stem)| stem);
    if gguf.ends_with("norm.weight") && stem.is_none() {
        values.iter_mut().for_each(|gain| *gain += 1.0);
    }
    // Rows of queries and keys come before rows of values.
    let before = 2 * sizes.key_heads * sizes.key_dim * row;
    if gguf.ends_with("attn_qkv.weight") || stem == Some("conv1d.weight") {
        let tiled = sizes.tiled(&values[before..], sizes.value_dim * row);
        values.splice(before.., tiled);
    }
    if gguf.ends_with("attn_gate.weight") {
        values = sizes.tiled(&values, sizes.value_dim * row);
    }
    match stem {
        Some("beta.weight" | "alpha.weight" | "dt.bias") => values = sizes.tiled(&values, row),
        Some("a") => {
            values = sizes.tiled(&values, 1);
            values.iter_mut().for_each(|log| *log = -log.exp());
        }
        Some("out.weight") => {
            let rows = values.chunks(row);
            values = rows.flat_map(|row| sizes.tiled(row, sizes.value_dim)).collect();
        }
        Some("conv1d.weight") => return (vec![shape[0], shape[2]], values),
        _ => {}
    }
    (shape, values)
}
