//! What loading a model in 16 bits takes: its own bytes, and one tensor beside it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{alloc::System, path::Path};

use kv_cubecl::{Flex, On};
use kv_eval::memory::Tracking;
use kv_models::{
    LayerSpec, LoadOptions, SaveOptions, Tokenizer, WeightDtype,
    llama::{Config, Llama},
    load_with,
    nn::RopeScaling,
    save,
};

#[global_allocator]
static ALLOCATOR: Tracking<System> = Tracking::new(System);

/// Eight layers, whose largest matrix is a 24th of the whole.
fn config() -> Config {
    Config {
        vocab_size: 512,
        hidden_size: 256,
        intermediate_size: 512,
        n_layers: 8,
        attention: LayerSpec::new(4, 2, 64),
        max_positions: 256,
        norm_epsilon: 1e-5,
        qkv_bias: true,
        output_bias: false,
        mlp_bias: false,
        tied_head: true,
        rotary_dim: 64,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        full_layers: Default::default(),
        unrotated_layers: Default::default(),
        qk_norms: false,
    }
}

#[test]
fn no_copy_of_the_model_is_made_while_it_is_read() {
    let device = On::<Flex>::open().unwrap();
    let file = "../models/tests/fixtures/bos/tokenizer.json";
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let tokenizer = Tokenizer::from_file(file, &[2]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bf16 = SaveOptions { dtype: WeightDtype::Bf16, cache: None };
    save(folder.path(), &Llama::init(config(), &device).into(), &tokenizer, bf16).unwrap();
    let options = |dtype| LoadOptions::default().with_dtype(dtype);
    let peak = |dtype| {
        let load = || load_with(folder.path(), &device, options(dtype)).unwrap().model;
        let (model, peak) = ALLOCATOR.peak_of(load);
        (model.weight_bytes(), peak)
    };
    let (wide, wide_peak) = peak(WeightDtype::F32);
    let (half, half_peak) = peak(WeightDtype::Auto);
    assert_eq!(2 * half, wide);
    // Beside the model: a tensor as it is in the file, one as it is handed on, and the tokenizer.
    assert!(half_peak < half + half / 4, "{half_peak} bytes for {half}");
    assert!(wide_peak > 2 * half, "the measure sees {wide_peak} of {wide}");
}
