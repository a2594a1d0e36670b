//! Recall of indexers, counted by the definition in f64.

use std::{collections::BTreeMap, path::PathBuf};

use kv_cubecl::{
    Flex, KvCacheConfig, KvFormat, On, reference,
    sparse::{IndexTrace, RowFormat},
};
use kv_eval::{Error, KeyFormat, Mode, Plan, index_recall};
use kv_models::{AttentionTrace, LanguageModel, ModelCacheConfig, ids_to_tensor, load};

use crate::common::{assert_one_line, kv_eval};

const TOKENS: usize = 200;

fn folder() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/deepseek/deepseek-v4-tiny").into()
}

fn ids(model: &LanguageModel, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (i * i + 7 * i) % model.vocab_size() as u32).collect()
}

fn plan(model: &LanguageModel, tokens: usize) -> Plan {
    let none: [ModelCacheConfig; 0] = [];
    Plan::new(model, Mode::Parallel, none, ids(model, tokens), tokens, None).unwrap()
}

fn formats() -> Vec<KeyFormat> {
    let codes = [KvFormat::named("e4m3b").unwrap(), KvFormat::named("e2m1b").unwrap()];
    codes
        .into_iter()
        .flat_map(|codes| [false, true].map(|hadamard| KeyFormat { codes, hadamard }))
        .collect()
}

/// Hits and tokens of each layer and number of entries, counted one by one.
fn counted(
    model: &LanguageModel,
    device: &On<Flex>,
    format: KeyFormat,
) -> BTreeMap<(usize, usize), (usize, usize)> {
    let mut cells = BTreeMap::new();
    let mut observe = |trace: AttentionTrace| {
        let sparse = trace.sparse().unwrap();
        let Some(IndexTrace { query, keys, .. }) = &sparse.index else { return };
        let (top_k, ratio) =
            (sparse.config.index.unwrap().top_k, sparse.config.compression.unwrap().ratio);
        let [_, heads, tokens, width] = query.query.dims();
        let host = |data: burn::tensor::TensorData| data.iter::<f32>().collect::<Vec<_>>();
        let queries = host(query.query.clone().into_data());
        let weights = host(query.weights.clone().into_data());
        let keys = host(keys.clone().into_data());
        let wide = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let turned = |row: &[f32]| match format.hadamard {
            true => reference::hadamard(&wide(row).iter().map(|&x| x as f32).collect::<Vec<f32>>())
                .into_iter()
                .map(f64::from)
                .collect(),
            false => wide(row),
        };
        let exact: Vec<Vec<f64>> = keys.chunks(width).map(wide).collect();
        let stored: Vec<Vec<f64>> = keys
            .chunks(width)
            .map(|key| {
                let key: Vec<f32> = turned(key).iter().map(|&x| x as f32).collect();
                wide(&reference::stored_row(&key, RowFormat::codes(format.codes)))
            })
            .collect();
        for t in 0..tokens {
            let seen = (t + 1) / ratio;
            if seen <= top_k {
                continue;
            }
            let head = |h: usize| &queries[(h * tokens + t) * width..][..width];
            let plain: Vec<f64> = (0..heads).flat_map(|h| wide(head(h))).collect();
            let transformed: Vec<f64> = (0..heads).flat_map(|h| turned(head(h))).collect();
            let weights = wide(&weights[t * heads..][..heads]);
            let selected = |query: &[f64], keys: &[Vec<f64>]| {
                let scores: Vec<f64> = keys[..seen]
                    .iter()
                    .map(|key| reference::index_score(query, &weights, key))
                    .collect();
                reference::highest_scores(&scores, top_k)
            };
            let exact = selected(&plain, &exact);
            let hits = selected(&transformed, &stored);
            let hits = hits.iter().filter(|entry| exact.contains(entry)).count();
            let from = (1..=seen).rev().find(|n| n.is_power_of_two()).unwrap();
            let cell = cells.entry((trace.layer, from)).or_insert((0, 0));
            *cell = (cell.0 + hits, cell.1 + 1);
        }
    };
    let float = KvCacheConfig::float().into();
    let ids = ids_to_tensor(&ids(model, TOKENS), [1, TOKENS], device);
    model.hidden_with(ids, &float, Default::default(), Some(&mut observe)).unwrap();
    cells
}

#[test]
fn recall_is_as_counted() {
    let device = On::<Flex>::open().unwrap();
    let model = load(folder(), &device).unwrap().model;
    let mut windows = vec![];
    let plan = plan(&model, TOKENS);
    let found =
        index_recall(&device, &model, &plan, &formats(), |done, all| windows.push((done, all)));
    let found = found.unwrap();
    assert_eq!(windows, [(1, 1)]);
    let mut below = 0;
    for format in formats() {
        let expected = counted(&model, &device, format);
        let cells: Vec<_> =
            found.cells.iter().filter(|cell| cell.format == format.to_string()).collect();
        assert_eq!(cells.len(), expected.len(), "{format}");
        for cell in cells {
            let (hits, tokens) = expected[&(cell.layer, cell.from)];
            assert_eq!(cell.tokens, tokens);
            let expected = hits as f64 / (tokens * cell.top_k) as f64;
            // An entry may change places with one whose score differs in the last bits of f32.
            let ties = 2.0 / (tokens * cell.top_k) as f64;
            assert!((cell.recall - expected).abs() <= ties, "{cell:?}: {expected}");
            below += usize::from(cell.recall < 1.0);
        }
    }
    assert!(below > 0, "no format loses an entry: {found}");
}

#[test]
fn what_has_no_recall_is_refused() {
    let device = On::<Flex>::open().unwrap();
    let model = load(folder(), &device).unwrap().model;
    let short = plan(&model, 12);
    let error = index_recall(&device, &model, &short, &formats(), |_, _| ()).unwrap_err();
    assert!(matches!(error, Error::Plan { .. }), "{error:?}");
    assert!(error.to_string().contains("window 12"), "{error}");
    let dense = folder().join("../../models/llama-tiny");
    let dense = load(dense, &device).unwrap().model;
    let error = index_recall(&device, &dense, &plan(&dense, 12), &formats(), |_, _| ());
    assert!(error.unwrap_err().to_string().contains("without an indexer"));
}

#[test]
fn wrong_arguments_are_named() {
    let austen = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");
    let text = format!("{austen}/heldout.txt");
    let index =
        |more: &[&str]| kv_eval(&[&["index", "--model", austen, "--text", &text], more].concat());
    assert_one_line(&index(&[]), &["model", "without an indexer"]);
    let outcome = index(&["--keys", "e4"]);
    assert_ne!(outcome.code, 0);
    assert!(outcome.stderr.contains("must be one of"), "{}", outcome.stderr);
}
