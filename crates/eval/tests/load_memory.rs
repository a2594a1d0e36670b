//! Memory of loading a model: its own bytes and one more tensor; for packed weights the bytes of
//! the file.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    alloc::System,
    fs,
    io::{self, Write},
    path::Path,
    sync::Mutex,
};

use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::memory::Tracking;
use kv_models::{
    LayerSpec, LoadOptions, SaveOptions, Tokenizer, WeightDtype, ids_to_tensor,
    kv_weights::Activations,
    llama::{Config, Llama},
    load_with,
    nn::RopeScaling,
    save,
};

#[global_allocator]
static ALLOCATOR: Tracking<System> = Tracking::new(System);

/// Serializes the tests, because all memory of the program is counted.
static ALONE: Mutex<()> = Mutex::new(());

/// Returns a model of eight layers whose largest matrix is a 24th of the whole.
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
        layers_without_rope: Default::default(),
        qk_norms: false,
    }
}

#[test]
fn loading_makes_no_copy_of_the_model() {
    let _alone = ALONE.lock().unwrap();
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
    // Besides the model: a tensor as in the file, a converted one, and the tokenizer.
    assert!(half_peak < half + half / 4, "{half_peak} bytes for {half}");
    assert!(wide_peak > 2 * half, "the measure sees {wide_peak} of {wide}");
}

/// Writes a GGUF file of a Llama with random blocks of Q4_0: 4 layers, 60 MB.
fn write_gguf(path: &Path) {
    const HIDDEN: u64 = 1024;
    const FF: u64 = 2816;
    let mut tensors: Vec<(String, Vec<u64>, bool)> = vec![
        ("token_embd.weight".into(), vec![HIDDEN, 16384], true),
        ("output_norm.weight".into(), vec![HIDDEN], false),
    ];
    for layer in 0..4 {
        // The order of llama.cpp's converter.
        for (name, columns, rows) in [
            ("attn_norm", HIDDEN, 0),
            ("ffn_down", FF, HIDDEN),
            ("ffn_gate", HIDDEN, FF),
            ("ffn_up", HIDDEN, FF),
            ("ffn_norm", HIDDEN, 0),
            ("attn_k", HIDDEN, KV),
            ("attn_output", HIDDEN, HIDDEN),
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_v", HIDDEN, KV),
        ] {
            let dims = if rows == 0 { vec![columns] } else { vec![columns, rows] };
            tensors.push((format!("blk.{layer}.{name}.weight"), dims, rows > 0));
        }
    }
    let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut head = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
    head.extend((tensors.len() as u64).to_le_bytes());
    let numbers = [
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", FF as u32),
        ("block_count", 4),
        ("attention.head_count", 16),
        ("attention.head_count_kv", 4),
        ("context_length", 2048),
    ];
    head.extend((numbers.len() as u64 + 1).to_le_bytes());
    head.extend(
        [string("general.architecture"), 8u32.to_le_bytes().to_vec(), string("llama")].concat(),
    );
    for (key, value) in numbers {
        head.extend([string(&format!("llama.{key}")), 4u32.to_le_bytes().to_vec()].concat());
        head.extend(value.to_le_bytes());
    }
    let bytes = |dims: &[u64], packed: bool| {
        let n: u64 = dims.iter().product();
        if packed { n / 32 * 18 } else { 4 * n }
    };
    let mut offset = 0;
    for (name, dims, packed) in &tensors {
        head.extend([string(name), (dims.len() as u32).to_le_bytes().to_vec()].concat());
        dims.iter().for_each(|dim| head.extend(dim.to_le_bytes()));
        head.extend((if *packed { 2u32 } else { 0 }).to_le_bytes());
        head.extend(u64::to_le_bytes(offset));
        offset += bytes(dims, *packed).next_multiple_of(32);
    }
    head.resize(head.len().next_multiple_of(32), 0);
    let mut file = io::BufWriter::new(fs::File::create(path).unwrap());
    file.write_all(&head).unwrap();
    let mut state = 1u32;
    for (_, dims, packed) in &tensors {
        let mut data = Vec::new();
        while (data.len() as u64) < bytes(dims, *packed) {
            if *packed {
                data.extend([0x00, 0x18]); // a scale of 2^-9 in f16
                for _ in 0..4 {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    data.extend(state.to_le_bytes());
                }
            } else {
                data.extend(1f32.to_le_bytes());
            }
        }
        data.resize(data.len().next_multiple_of(32), 0);
        file.write_all(&data).unwrap();
    }
}

/// Tokens of a prompt.
const PROMPT: usize = 512;
/// Rows of the keys, and of the values, of a layer.
const KV: u64 = 256;

/// Returns the bytes of a file that are in this program's memory.
#[cfg(target_os = "linux")]
fn resident(path: &Path) -> usize {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let of_file =
        maps.split_inclusive("VmFlags").filter(|map| map.contains(path.to_str().unwrap()));
    let rss = |map: &str| -> usize {
        let line = map.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    };
    of_file.map(rss).sum()
}

/// Packed weights are the pages of the file. Rows of queries, keys and values are joined, so they
/// are copied once and their pages are released. Restored weights keep no page.
#[cfg(target_os = "linux")]
#[test]
fn packed_weights_are_in_memory_once() {
    let _alone = ALONE.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("random.gguf");
    write_gguf(&path);
    let file = fs::metadata(&path).unwrap().len() as usize;
    let device = On::<Flex>::open().unwrap();
    let run = |packed| {
        let options = LoadOptions::default().with_packed(packed);
        ALLOCATOR.peak_of(|| {
            let model = load_with(&path, &device, options).unwrap().model;
            let cache = KvCacheConfig::float().with_capacity(PROMPT + 64);
            let mut cache = model.new_cache(cache, 1, &device).unwrap();
            let bytes = cache.memory_bytes().total();
            let prompt: Vec<u32> = (0..PROMPT as u32).collect();
            let prompt = ids_to_tensor(&prompt, [1, PROMPT], &device);
            model.hidden_step(prompt, &mut cache).unwrap();
            model.step(ids_to_tensor(&[4], [1, 1], &device), &mut cache).unwrap();
            (model, bytes)
        })
    };
    let ((model, cache), peak) = run(Some(Activations::Int8));
    let copied = 4 * (1024 + 2 * KV as usize) * 1024 / 32 * 18;
    // For each token of a prompt: the residual stream, the sum added to it, queries, keys and
    // values before and after rope, and the attention output. For 256 tokens: gate and up
    // projections, and their product.
    let (hidden, qkv, ff) = (1024, 1024 + 2 * KV as usize, 2816);
    let pass = 4 * (PROMPT * (3 * hidden + 2 * qkv) + 256 * 4 * ff);
    // The largest matrix that is being copied, and buffers of forward passes and threads.
    let rest = copied / 4 + pass + (3 << 20);
    assert!(
        peak < copied + cache + rest,
        "{peak} bytes beside a file of {file}, {copied} of it copied"
    );
    let mapped = resident(&path);
    // Each copied range has up to two incomplete pieces of 64 KiB.
    let ends = 12 * (128 << 10);
    assert!(mapped < file - copied + ends, "{mapped} of {file} bytes, {copied} copied");
    assert!(mapped > file / 2, "the measure sees {mapped} of {file} bytes");
    assert!(mapped + peak < file + cache + rest + ends, "{mapped} + {peak} for {file}");
    drop(model);

    // f32 weights are 7x the file. Only a part of the largest tensor is in memory twice.
    let ((model, cache), peak) = run(None);
    let largest = 4 * 16384 * 1024;
    let weights = model.weight_bytes();
    assert!(peak < weights + cache + largest / 8 + rest, "{peak} bytes for {weights}");
    assert!(resident(&path) < file / 20, "{} of {file}", resident(&path));
}
