//! The repository's model with sparse attention: its cache in few bits, its bytes, its indexer, and
//! what it finds again.
use std::path::Path;

use kv_cubecl::{Flex, KvCacheConfig, KvFormat, On};
use kv_eval::{KeyFormat, Mode, NeedlePlan, Plan, evaluate, index_recall, needles};
use kv_models::{LanguageModel, LayerSpec, ModelCacheConfig, Tokenizer, load};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

fn austen_sparse() -> (On<Flex>, LanguageModel, Tokenizer) {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(Path::new(MODELS).join("austen-sparse"), &device).unwrap();
    (device, loaded.model, loaded.tokenizer.unwrap())
}

/// The beginning of the novel that the model was not trained on.
fn heldout() -> String {
    std::fs::read_to_string(Path::new(MODELS).join("austen/heldout.txt")).unwrap()
}

fn caches<const N: usize>(names: [&str; N]) -> Vec<ModelCacheConfig> {
    names.map(|name| name.parse().unwrap()).into()
}

#[test]
fn four_and_three_bits_lose_less_than_one_percent() {
    let (device, model, tokenizer) = austen_sparse();
    let ids = tokenizer.encode(&heldout()).unwrap();
    let caches = caches(["k4v4", "k3v3"]);
    let plan = Plan::new(&model, Mode::Parallel, caches, ids, 1024, Some(8192)).unwrap();
    let runs = evaluate(&device, &model, &plan, |_| ()).unwrap();
    let float = runs[0].perplexity;
    for run in &runs[1..] {
        assert!(run.perplexity < 1.01 * float, "{}: {} of {float}", run.cache, run.perplexity);
    }
    // A model that ignores its compressed entries sees 32 tokens, and could not copy.
    assert!(float < 4.0, "{float}");
}

/// The dense model that it is compared with has as many parameters: three layers with three key and
/// value heads of 32 channels.
#[test]
fn its_cache_is_a_quarter_of_a_dense_one() {
    let (_, model, _) = austen_sparse();
    let float = KvCacheConfig::float().with_capacity(1024);
    let layers = model.spec().layers.iter();
    let bytes: usize = layers.map(|layer| layer.cache_bytes(&float, 1).unwrap().total()).sum();
    let dense = 3 * LayerSpec::new(6, 3, 32).cache_bytes(&float, 1).unwrap().total();
    assert!(4 * bytes <= dense, "{bytes} of {dense}");
}

/// Half of the entries are selected, so that most tokens have to select.
#[test]
fn its_indexer_selects_right_with_quantized_keys() {
    let (device, model, tokenizer) = austen_sparse();
    let ids = tokenizer.encode(&heldout()).unwrap();
    let none: [ModelCacheConfig; 0] = [];
    let plan = Plan::new(&model, Mode::Parallel, none, ids, 1024, Some(4096)).unwrap();
    let key = |codes, hadamard| KeyFormat { codes, hadamard };
    let formats = [key(KvFormat::E4m3Blocks, false), key(KvFormat::E2m1Blocks, true)];
    let found = index_recall(&device, &model, &plan, &formats, |_, _| ()).unwrap();
    for (format, least) in formats.iter().zip([0.99, 0.97]) {
        let cells = found.cells.iter().filter(|cell| cell.format == format.to_string());
        for cell in cells {
            assert!(cell.recall >= least, "{found}");
        }
    }
}

/// The text has each line once, so that nothing but the needle tells how it goes on.
#[test]
fn it_finds_needles_in_every_chunk() {
    let (device, model, tokenizer) = austen_sparse();
    let text = heldout();
    let mut lines: Vec<&str> = vec![];
    for line in text.lines() {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let ids = tokenizer.encode(&(lines.join("\n") + "\n")).unwrap();
    let plan = NeedlePlan { context: 1024, needle: 48, cue: 16, chunks: 8 };
    let found = needles(&device, &model, &ids, &caches(["float", "k4v4"]), plan, |_| ()).unwrap();
    assert_eq!(found.rows.len(), 16);
    for row in &found.rows {
        assert!(row.found > row.without && row.nll < row.nll_without, "{found}");
    }
}
