//! Arguments of sparse attention that are refused.

use burn::tensor::{Device, Tensor};
use kv_cubecl::{
    CacheFloat, Error, KvFormat, On, Result, RopeTable, Target,
    sparse::{
        Compression, EntryCompressor, Gated, IndexConfig, IndexQuery, KeyCompressor, RowFormat,
        SparseConfig, SparseMemory, SparseOptions, Visible, index_scores, select_entries,
        sparse_attention,
    },
};

use crate::{
    common::{Rng, stamp},
    sparse_inputs::{Attended, Index, Projections, gated, without_heads},
};

stamp!(
    compressors_that_do_not_fit,
    configurations_of_layers_are_checked,
    calls_that_are_not_as_the_layer_says,
);

/// Asserts that a call is refused for a field, its value and a rule.
#[track_caller]
fn refused<R: core::fmt::Debug>(result: Result<R>, field: &str, value: &str, rule: &str) {
    let error = result.unwrap_err();
    let Error::InvalidConfig { field: named, value: of, .. } = &error else {
        panic!("{field} {value}: {error:?}")
    };
    assert_eq!((*named, of.as_str()), (field, value), "{error}");
    let message = error.to_string();
    assert!(message.starts_with(&format!("{field} {value}: ")), "{message}");
    assert!(message.contains(rule), "{message}");
}

/// Asserts that a call is refused for the shape of a tensor.
#[track_caller]
fn misfit<R: core::fmt::Debug>(result: Result<R>, tensor: &str, shape: &[usize], rule: &str) {
    let error = result.unwrap_err();
    let Error::Shape { tensor: named, shape: of, .. } = &error else {
        panic!("{tensor}: {error:?}")
    };
    assert_eq!((*named, of.as_slice()), (tensor, shape), "{error}");
    let message = error.to_string();
    assert!(message.contains(&format!("{tensor} has shape {shape:?}: ")), "{message}");
    assert!(message.contains(rule), "{message}");
}

fn compressors_that_do_not_fit<T: Target>(on: &On<T>) {
    let device: &Device = on;
    let table = |shape: [usize; 2]| RopeTable::new(Tensor::ones(shape, device)).unwrap();
    let new = |compression, bias: [usize; 2], width: usize, rope: [usize; 2]| {
        let (bias, gain) = (Tensor::zeros(bias, device), Tensor::ones([width], device));
        EntryCompressor::new(compression, bias, gain, 1e-6, table(rope))
    };
    let (plain, overlapping) = (Compression::new(4), Compression::overlapping(4));
    for compression in [Compression::new(0), Compression::overlapping(0)] {
        refused(new(compression, [1, 8], 8, [9, 4]), "ratio", "0", "at least 1");
    }
    for (compression, bias, rule) in [
        (plain, [4, 16], "[4, 8]"),
        (plain, [3, 8], "[4, 8]"),
        (overlapping, [4, 8], "[4, 16]"),
        (overlapping, [8, 8], "[4, 16]"),
    ] {
        misfit(new(compression, bias, 8, [9, 4]), "position_bias", &bias, rule);
    }
    misfit(new(plain, [4, 8], 8, [9, 10]), "rope", &[9, 10], "8 channels");
    let keys = |width: usize| {
        let (bias, gain) = (Tensor::zeros([4, width], device), Tensor::ones([width], device));
        KeyCompressor::new(plain, bias, gain, 1e-6, table([9, 4]), true)
    };
    keys(16).unwrap();
    refused(keys(12), "index_head_dim", "12", "power of two");
    refused(keys(512), "index_head_dim", "512", "up to 256");
    let compressor = new(overlapping, [4, 16], 8, [9, 4]).unwrap();
    let compress = |content: [usize; 3], gate: [usize; 3]| {
        let (content, gate) = (Tensor::zeros(content, device), Tensor::zeros(gate, device));
        compressor.compress(Gated { content, gate })
    };
    assert_eq!(compress([2, 9, 16], [2, 9, 16]).unwrap().unwrap().dims(), [2, 1, 2, 8]);
    misfit(compress([2, 9, 8], [2, 9, 8]), "content", &[2, 9, 8], "= 16]");
    misfit(compress([2, 9, 16], [2, 9, 8]), "gate", &[2, 9, 8], "[2, 9, ");
    misfit(compress([2, 9, 16], [2, 8, 16]), "gate", &[2, 8, 16], "[2, 9, ");
    misfit(compress([2, 9, 16], [1, 9, 16]), "gate", &[1, 9, 16], "[2, 9, ");
    misfit(compress([2, 12, 16], [2, 12, 16]), "rope", &[9, 4], "each of the 12 tokens");
}

fn configurations_of_layers_are_checked<T: Target>(_on: &On<T>) {
    let compression = Compression::overlapping(4);
    let window = SparseConfig::new(512, 128);
    let all = window.with_compression(compression);
    let float = RowFormat::float(CacheFloat::F32);
    let index = IndexConfig { head_dim: 128, top_k: 512, keys: float };
    for config in [window, all, all.with_index(index)] {
        config.validate().unwrap();
    }
    let invalid = |config: SparseConfig, field: &str, value: &str, rule: &str| {
        refused(config.validate(), field, value, rule);
    };
    let zero = "at least 1";
    invalid(SparseConfig::new(0, 128), "head_dim", "0", zero);
    invalid(SparseConfig::new(512, 0), "sliding_window", "0", zero);
    invalid(window.with_capacity(0), "capacity", "0", zero);
    invalid(window.with_compression(Compression::new(0)), "ratio", "0", zero);
    invalid(all.with_index(IndexConfig { top_k: 0, ..index }), "top_k", "0", zero);
    let no_width = IndexConfig { head_dim: 0, ..index };
    invalid(all.with_index(no_width), "index.head_dim", "0", zero);
    invalid(window.with_index(index), "index", "top_k 512", "set compression");
    let wide = RowFormat::codes(KvFormat::E4m3Blocks).with_float_channels(513, CacheFloat::Bf16);
    let mut config = all;
    config.entries = wide;
    invalid(config, "float_channels", "513", "512 channels of a row of entries");
    let keys = IndexConfig { keys: wide, ..index };
    invalid(all.with_index(keys), "float_channels", "513", "128 channels of a row of index keys");
}

fn calls_that_are_not_as_the_layer_says<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(408);
    let compression = Compression::new(4);
    let (tokens, width) = (9, 8);
    let text = Projections::new(&mut rng, compression, [1, tokens, width, 2]);
    let [content, gate, position_bias, gain] = text.on(on);
    let compressor = text.compressor(position_bias.clone(), gain.clone());
    let keys = text.key_compressor(position_bias, gain);
    let gated = || gated(content.clone(), gate.clone());
    let layer = Attended::new(&mut rng, compression, [1, 2, tokens, width]);
    let [query, rows, _, _] = layer.on(on);
    let index = Index::new(&mut rng, [1, 2, tokens, 2, width]);
    let [index_query, weights, index_keys] = index.on(on);
    let index_query = IndexQuery { query: index_query, weights: without_heads(weights) };

    let window = SparseConfig::new(width, 4).with_capacity(tokens);
    let all = window.with_compression(compression);
    let format = RowFormat::float(CacheFloat::F32);
    let indexed = all.with_index(IndexConfig { head_dim: width, top_k: 1, keys: format });
    let memory = |config| SparseMemory::parallel(config);
    let entries = memory(all).compress(&compressor, gated()).unwrap();
    let selection = memory(indexed).select(&keys, gated(), &index_query).unwrap();

    let attend =
        |config, seen: Visible<'_>| memory(config).attend(query.clone(), rows.clone(), seen, None);
    attend(window, Visible::Window).unwrap();
    attend(all, Visible::All(&entries)).unwrap();
    attend(indexed, Visible::Selected(&entries, &selection)).unwrap();
    let no_entries = "has compressed entries";
    refused(attend(all, Visible::Window), "entries", "none", no_entries);
    refused(attend(indexed, Visible::Window), "entries", "none", no_entries);
    let unselected = attend(indexed, Visible::All(&entries));
    refused(unselected, "selection", "none", "has an indexer");
    let no_such = "has no such entries";
    refused(attend(window, Visible::All(&entries)), "entries", "some", no_such);
    let selected = || Visible::Selected(&entries, &selection);
    refused(attend(window, selected()), "entries", "some", no_such);
    refused(attend(all, selected()), "entries", "some", no_such);

    // Compressors and indexers that the layer does not have.
    let other = Compression::overlapping(4);
    for config in [window, window.with_compression(other)] {
        let error = memory(config).compress(&compressor, gated()).unwrap_err();
        let message = error.to_string();
        let starts = message.starts_with(&format!("compression {compression:?}: "));
        assert!(starts && message.contains(&format!("{:?}", config.compression)), "{message}");
    }
    for config in [window, all] {
        let result = memory(config).select(&keys, gated(), &index_query);
        refused(result, "index", "none", "no indexer");
    }
    let scores = || index_scores(&index_query, &index_keys).unwrap();
    refused(select_entries(scores(), 0, compression, 0), "top_k", "0", "at least 1");

    // Shapes.
    let narrow = Tensor::<4>::zeros([1, 1, 2, width / 2], &**on);
    let result = index_scores(&index_query, &narrow);
    misfit(result, "query", &[1, 2, tokens, width], "4 channels of the keys");
    let weights = Tensor::zeros([1, tokens, 3], &**on);
    let wrong = IndexQuery { query: index_query.query.clone(), weights };
    misfit(index_scores(&wrong, &index_keys), "weights", &[1, tokens, 3], "[1, 9, 2]");
    let options = SparseOptions { sliding_window: 4, scale: None, sink_logits: None };
    for shape in [[1, 2, tokens, width], [1, 1, tokens - 1, width], [1, 1, tokens, width - 1]] {
        let rows = Tensor::zeros(shape, &**on);
        let result = sparse_attention(query.clone(), &rows, None, &options);
        misfit(result, "rows", &shape, "[1, 1, 9, 8]");
    }
}
