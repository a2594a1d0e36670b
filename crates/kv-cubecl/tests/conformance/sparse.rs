//! Sparse attention over compressed entries, compared with its definition token by token.

use burn::tensor::{DType, Tensor, TensorData};
use kv_cubecl::{
    CacheFloat, On, Target, reference,
    sparse::{
        Compression, IndexConfig, IndexQuery, RowFormat, Selection, SparseConfig, SparseMemory,
        Visible, rope_pairs, select_entries,
    },
};

use crate::{
    common::{CLOSE, Host, Rng, close, equal_bits, skipped, stamp},
    sparse_inputs::{
        Attended, Index, Projections, compressions, gated, scores, visible, without_heads,
    },
};

stamp!(
    rope_of_neighboring_pairs,
    entries_follow_the_definition,
    an_entry_depends_on_its_tokens_only,
    scores_and_selections_follow_the_definition,
    selections_of_known_scores,
    attention_follows_the_definition,
    a_token_sees_an_entry_from_the_end_of_its_window_on,
    layers_follow_the_definition,
    narrow_inputs_are_computed_in_f32,
);

/// Tables for all sequences or for each of them. Negated sines undo rope.
fn rope_of_neighboring_pairs<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(400);
    let [batch, heads, tokens] = [2, 3, 5];
    for (width, pairs) in [(10, 3), (8, 4), (2, 1), (7, 2)] {
        let x = Host::normal(&mut rng, [batch, heads, tokens, width]);
        for tables in [1, batch] {
            let shape = [tables, 1, tokens, pairs];
            let angles = Host::from_fn(shape, || 6.3 * rng.uniform());
            let part = |function: fn(f32) -> f32| {
                let data = angles.data.iter().map(|&angle| function(angle)).collect();
                Host { data, shape }.on(on)
            };
            let (cos, sin) = (part(f32::cos), part(f32::sin));
            let expected = |x: &[f64], sign: f64| -> Vec<f64> {
                let rows = x.chunks(width).enumerate().map(|(row, x)| {
                    let (sequence, token) = (row / (heads * tokens), row % tokens);
                    let table = sequence % tables * tokens + token;
                    let angles = &angles.data[table * pairs..][..pairs];
                    let angles: Vec<f64> =
                        angles.iter().map(|&angle| sign * f64::from(angle)).collect();
                    reference::rope_pairs(x, &angles)
                });
                rows.collect::<Vec<_>>().concat()
            };
            let got = rope_pairs(x.on(on), cos.clone(), sin.clone());
            let what = format!("{pairs} pairs of {width} channels, {tables} tables");
            close(&what, &Host::of(got.clone()), &expected(&x.f64(), 1.0), CLOSE);
            let undone = rope_pairs(x.on(on), cos.clone(), sin.clone().neg());
            close(&what, &Host::of(undone), &expected(&x.f64(), -1.0), CLOSE);
            let back = rope_pairs(got, cos, sin.neg());
            close(&what, &Host::of(back), &x.f64(), CLOSE);
        }
    }
}

/// The norm divides a sum of up to 64 products by its root mean square, which is at least a tenth
/// of the products' magnitude; [`CLOSE`] has room for that.
fn entries_follow_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(401);
    for compression in compressions() {
        let ratio = compression.ratio;
        for tokens in [ratio - 1, ratio, 2 * ratio, 3 * ratio + ratio / 2, 5 * ratio - 1] {
            if tokens == 0 {
                continue;
            }
            let mut text = Projections::random(&mut rng, compression, 2, tokens);
            text.hadamard = text.parts[3].data.len().is_power_of_two() && rng.below(2) == 0;
            let n = tokens / ratio;
            let Some(got) = text.entries(text.on(on)) else {
                assert_eq!(n, 0, "{compression:?}: {tokens} tokens have no entries");
                continue;
            };
            assert_eq!(got.dims(), [2, 1, n, text.parts[3].data.len()]);
            let what = format!(
                "{compression:?}: {tokens} tokens of {} channels, {} pairs, Hadamard {}",
                text.parts[3].data.len(),
                text.pairs,
                text.hadamard
            );
            close(what, &Host::of(got), &text.expected(&text.f64()), CLOSE);
        }
    }
}

/// A token's own channels change the entry of its window, the channels for the next window change
/// the next one, and no other changes by a bit.
fn an_entry_depends_on_its_tokens_only<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(402);
    for compression in [Compression::new(3), Compression::overlapping(3)] {
        let (tokens, width) = (3 * 3 + 2, 4);
        let text = Projections::new(&mut rng, compression, [1, tokens, width, 1]);
        let entries = |text: &Projections| Host::of(text.entries(text.on(on)).unwrap()).data;
        let before = entries(&text);
        for t in 0..tokens {
            for lane in 0..compression.lanes() {
                for part in 0..2 {
                    let mut changed = text.clone();
                    let first = (t * compression.lanes() + lane) * width;
                    changed.parts[part].data[first..first + width].fill(3.0);
                    let after = entries(&changed);
                    let both = before.chunks(width).zip(after.chunks(width)).enumerate();
                    let differ = both.filter(|(_, (before, after))| before != after);
                    let differ: Vec<usize> = differ.map(|(entry, _)| entry).collect();
                    let own = lane + 1 == compression.lanes();
                    let entry = if own { t / 3 } else { t / 3 + 1 };
                    let expected = if entry < 3 { vec![entry] } else { vec![] };
                    assert_eq!(differ, expected, "{compression:?}: token {t} lane {lane}");
                }
            }
        }
    }
}

/// Asserts that a selection has the entries with the highest `scores` `[batch, tokens, n]` among
/// those that a token sees. Sets are compared: entries whose scores differ from the lowest selected
/// score by no more than the tolerance of scores may be selected or not.
#[track_caller]
fn check_selection(
    what: &str,
    selection: &Selection,
    scores: &[f64],
    n: usize,
    compression: Compression,
    top_k: usize,
) {
    let [batch, tokens, width] = selection.indices().dims();
    let indices: Vec<i64> = selection.indices().clone().into_data().iter::<i64>().collect();
    assert_eq!(scores.len(), batch * tokens * n, "{what}");
    assert!(width <= top_k.max(1), "{what}: {width} entries for a token");
    let tolerance = CLOSE * scores.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    for (row, indices) in indices.chunks(width).enumerate() {
        let what = format!("{what}: token {} selects {indices:?}", row % tokens);
        let seen = visible(compression, n, row % tokens);
        let scores = &scores[row * n..][..seen];
        let mut selected: Vec<usize> =
            indices.iter().filter(|&&i| i != -1).map(|&i| i as usize).collect();
        assert_eq!(selected.len(), top_k.min(seen), "{what} of {seen}");
        selected.sort_unstable();
        selected.dedup();
        assert_eq!(selected.len(), top_k.min(seen), "{what}: twice the same");
        assert!(selected.iter().all(|&i| i < seen), "{what} of {seen}");
        let Some(&last) = reference::highest_scores(scores, top_k).last() else { continue };
        for (entry, &score) in scores.iter().enumerate() {
            let wrong = match selected.contains(&entry) {
                true => score < scores[last] - tolerance,
                false => score > scores[last] + tolerance,
            };
            assert!(!wrong, "{what}: entry {entry} has {score}, the last {}", scores[last]);
        }
    }
}

fn scores_and_selections_follow_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(403);
    for compression in compressions() {
        let ratio = compression.ratio;
        for tokens in [ratio, 2 * ratio + 1, 66 + rng.below(80)] {
            let n = tokens / ratio;
            let (heads, width) = ([1, 2, 3, 8][rng.below(4)], [4, 6, 16, 32][rng.below(4)]);
            let index = Index::new(&mut rng, [2, heads, tokens, n, width]);
            let expected = index.expected(&index.f64());
            let got = scores(index.on(on));
            assert_eq!(got.dims(), [2, tokens, n]);
            let what = format!("{compression:?}: {heads} heads, {tokens} tokens, width {width}");
            close(&what, &Host::of(got.clone().unsqueeze()), &expected, CLOSE);
            for top_k in [1, 1 + rng.below(n), n, n + 3] {
                let selection = select_entries(got.clone(), 0, compression, top_k).unwrap();
                check_selection(&what, &selection, &expected, n, compression, top_k);
            }
        }
    }
}

/// Ties, scores below 0, tokens that are not the first, and tokens that see less than `top_k`.
fn selections_of_known_scores<T: Target>(on: &On<T>) {
    let scores: [[f32; 5]; 4] = [
        [1.0, 2.0, 2.0, 9.0, 9.0],
        [-1.0, -3.0, -2.0, 9.0, 9.0],
        [0.0, 0.0, 0.0, 0.0, 9.0],
        [5.0, -4.0, 5.0, -4.0, -5.0],
    ];
    // Tokens 5 to 8 see 3, 3, 4 and 4 entries of 2 tokens each.
    let cases: [(usize, [&[f32]; 4]); 4] = [
        (1, [&[2.0], &[-1.0], &[0.0], &[5.0]]),
        (2, [&[2.0, 2.0], &[-1.0, -2.0], &[0.0, 0.0], &[5.0, 5.0]]),
        (3, [&[2.0, 2.0, 1.0], &[-1.0, -2.0, -3.0], &[0.0; 3], &[5.0, 5.0, -4.0]]),
        (7, [&[2.0, 2.0, 1.0], &[-1.0, -2.0, -3.0], &[0.0; 4], &[5.0, 5.0, -4.0, -4.0]]),
    ];
    let tensor = || Tensor::<3>::from_data(TensorData::new(scores.concat(), [1, 4, 5]), &**on);
    for (top_k, expected) in cases {
        let selection = select_entries(tensor(), 5, Compression::new(2), top_k).unwrap();
        let [_, _, width] = selection.indices().dims();
        let indices: Vec<i64> = selection.indices().clone().into_data().iter::<i64>().collect();
        for (t, indices) in indices.chunks(width).enumerate() {
            let mut selected: Vec<usize> =
                indices.iter().filter(|&&i| i >= 0).map(|&i| i as usize).collect();
            let absent = indices.iter().filter(|&&i| i == -1).count();
            assert_eq!(absent + selected.len(), width, "{indices:?}");
            let mut of_selected: Vec<f32> = selected.iter().map(|&i| scores[t][i]).collect();
            of_selected.sort_by(|a, b| b.total_cmp(a));
            assert_eq!(of_selected, expected[t], "token {t}, top {top_k}: {indices:?}");
            selected.sort_unstable();
            selected.dedup();
            assert_eq!(selected.len(), expected[t].len(), "twice the same: {indices:?}");
        }
    }
}

/// With all entries that a token sees, with some of them, with none yet, and with no sinks.
fn attention_follows_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(404);
    for compression in compressions() {
        let ratio = compression.ratio;
        for tokens in [ratio - 1, ratio, 2 * ratio + 1, 66 + rng.below(80)] {
            if tokens == 0 {
                continue;
            }
            let (heads, width) = ([1, 2, 3, 8][rng.below(4)], [4, 6, 16, 40][rng.below(4)]);
            let mut layer = Attended::new(&mut rng, compression, [2, heads, tokens, width]);
            for selects in [false, true] {
                layer.selected = None;
                if selects {
                    let top_k = 1 + rng.below(tokens / ratio + 2);
                    layer.select(&mut rng, top_k);
                }
                layer.with_sinks = rng.below(3) > 0;
                let (window, sinks) = (layer.sliding_window, layer.with_sinks);
                let what = format!(
                    "{compression:?}: {:?}, window {window}, sinks {sinks}, selects {selects}",
                    layer.parts[0].shape
                );
                let got = Host::of(layer.output(layer.on(on)));
                close(what, &got, &layer.expected(&layer.f64()), CLOSE);
            }
        }
    }
}

/// Another entry changes the output of each token from the last one of its window on, and of no
/// token before; selections take it from there on, too.
fn a_token_sees_an_entry_from_the_end_of_its_window_on<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(405);
    for compression in [1, 3, 4].map(Compression::new) {
        let (ratio, n, width) = (compression.ratio, 3, 8);
        let tokens = (n + 1) * ratio - 1;
        let mut layer = Attended::new(&mut rng, compression, [1, 2, tokens, width]);
        layer.sliding_window = 2;
        let before = Host::of(layer.output(layer.on(on)));
        for entry in 0..n {
            let mut changed = layer.clone();
            changed.parts[2].data[entry * width..][..width].fill(1.5);
            let after = Host::of(layer.output(changed.on(on)));
            for (row, (before, after)) in
                before.data.chunks(width).zip(after.data.chunks(width)).enumerate()
            {
                let t = row % tokens;
                let seen = t >= ratio * (entry + 1) - 1;
                assert_eq!(before != after, seen, "ratio {ratio}, entry {entry}, token {t}");
            }
        }
        for first in [0, 1, 2 * ratio] {
            let scores = Tensor::<3>::zeros([1, 3, n], &**on);
            let selection = select_entries(scores, first, compression, n).unwrap();
            let indices: Vec<i64> = selection.indices().clone().into_data().iter::<i64>().collect();
            for (i, indices) in indices.chunks(n).enumerate() {
                let t = first + i;
                for entry in 0..n {
                    let seen = t >= ratio * (entry + 1) - 1;
                    assert_eq!(
                        indices.contains(&(entry as i64)),
                        seen,
                        "ratio {ratio}, entry {entry}, token {t}: {indices:?}"
                    );
                }
            }
        }
    }
}

/// Whole layers: with a window only, with all entries, and with an indexer. The definition attends
/// to what the layer has selected, since scores that nearly tie may be selected differently.
fn layers_follow_the_definition<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(406);
    let compressions =
        [Compression::overlapping(4), Compression::new(32), Compression::overlapping(7)];
    for (compression, tokens) in
        compressions.into_iter().flat_map(|c| [(c, c.ratio - 1), (c, c.ratio), (c, 150)])
    {
        let (batch, heads, width, index_heads, index_width) = (2, 3, 16, 4, 8);
        let ratio = compression.ratio;
        let n = tokens / ratio;
        let text = Projections::new(&mut rng, compression, [batch, tokens, width, 4]);
        let mut keys = Projections::new(&mut rng, compression, [batch, tokens, index_width, 2]);
        keys.hadamard = true;
        let mut index = Index::new(&mut rng, [batch, index_heads, tokens, 1, index_width]);
        let mut layer = Attended::new(&mut rng, compression, [batch, heads, tokens, width]);
        (layer.sliding_window, layer.scale) = (10, None);
        layer.parts[2].data = text.expected(&text.f64()).iter().map(|&x| x as f32).collect();
        index.parts[2] = Host {
            data: keys.expected(&keys.f64()).iter().map(|&x| x as f32).collect(),
            shape: [batch, 1, n, index_width],
        };
        let window = SparseConfig::new(width, layer.sliding_window).with_capacity(tokens);
        let all = window.with_compression(compression);
        let key_format = RowFormat::float(CacheFloat::F32);
        for top_k in [None, Some(1), Some(3), Some(100)] {
            let config = top_k.map_or(all, |top_k| {
                all.with_index(IndexConfig { head_dim: index_width, top_k, keys: key_format })
            });
            config.validate().unwrap();
            let mut memory = SparseMemory::parallel(config);
            let what = format!("{compression:?}: {tokens} tokens, {:?}", config.index);
            let [content, gate, position_bias, gain] = text.on(on);
            let compressor = text.compressor(position_bias, gain);
            let entries = memory.compress(&compressor, gated(content, gate)).unwrap();
            let [query, rows, _, sinks] = layer.on(on);
            layer.selected = None;
            let selection = top_k.map(|top_k| {
                let [content, gate, position_bias, gain] = keys.on(on);
                let compressor = keys.key_compressor(position_bias, gain);
                let [query, weights] = [&index.parts[0], &index.parts[1]].map(|x| x.on(on));
                let query = IndexQuery { query, weights: without_heads(weights) };
                let selection = memory.select(&compressor, gated(content, gate), &query).unwrap();
                let scores = index.expected(&index.f64());
                check_selection(&what, &selection, &scores, n, compression, top_k);
                let width = selection.indices().dims()[2];
                let indices: Vec<i64> =
                    selection.indices().clone().into_data().iter::<i64>().collect();
                let row = |row: &[i64]| {
                    row.iter().filter(|&&i| i >= 0).map(|&i| i as usize).collect::<Vec<_>>()
                };
                layer.selected = Some(indices.chunks(width).map(row).collect());
                selection
            });
            let seen = match &selection {
                Some(selection) => Visible::Selected(&entries, selection),
                None => Visible::All(&entries),
            };
            let got = memory.attend(query, rows, seen, Some(sinks.flatten(0, 3))).unwrap();
            close(what, &Host::of(got), &layer.expected(&layer.f64()), CLOSE);
        }
        // A layer with a window only.
        let memory = SparseMemory::parallel(window);
        layer.selected = Some(vec![vec![]; batch * tokens]);
        let [query, rows, _, sinks] = layer.on(on);
        let sinks = Some(sinks.flatten(0, 3));
        let got = memory.attend(query, rows, Visible::Window, sinks).unwrap();
        close("window only", &Host::of(got), &layer.expected(&layer.f64()), CLOSE);
    }
}

/// Numbers of a narrow type give what the same numbers in f32 give, bit for bit.
fn narrow_inputs_are_computed_in_f32<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(407);
    let compression = Compression::overlapping(4);
    let text = Projections::new(&mut rng, compression, [1, 20, 16, 4]);
    let index = Index::new(&mut rng, [1, 2, 20, 5, 8]);
    let layer = Attended::new(&mut rng, compression, [1, 2, 20, 16]);
    for dtype in [DType::F16, DType::BF16] {
        if !on.supports_dtype(dtype) {
            skipped(&format!("the device has no {dtype:?}"));
            continue;
        }
        let run = |wide: bool| {
            let narrow = |x: Tensor<4>| {
                let x = x.cast(dtype);
                if wide { x.cast(DType::F32) } else { x }
            };
            let entries = text.entries(text.on(on).map(narrow)).unwrap();
            let scores = scores(index.on(on).map(narrow)).unsqueeze();
            [entries, scores, layer.output(layer.on(on).map(narrow))].map(|x| {
                assert_eq!(x.dtype(), DType::F32);
                Host::of(x).data
            })
        };
        for (what, (narrow, wide)) in
            ["entries", "scores", "output"].into_iter().zip(run(false).into_iter().zip(run(true)))
        {
            equal_bits(format!("{what} of {dtype:?}"), &narrow, &wide);
        }
    }
}
