//! RopeTable positions in the launches that append and attend.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_cubecl::{KvCache, KvMemory, On, RopeTable, Target, streaming_attention};

use crate::common::{
    CLOSE, Host, Rng, Setup, attend, close, same_contents, skipped, snapshot, stamp,
};

stamp!(
    a_counted_token_gets_rope,
    a_token_at_a_position_gets_rope,
    sequences_have_positions_of_their_own,
    positions_past_the_table_turn_like_its_last,
    wrong_tables_are_refused,
);

/// Caches of every way of storing keys, with sinks, windows and several rows of queries for a head,
/// few and many.
const SETUPS: [(&str, [usize; 5]); 14] = [
    ("k2v2-g16-r16", [2, 4, 2, 70, 64]),
    ("k4v2-g16-r32-s3-after", [1, 6, 2, 70, 48]),
    ("k8v16-g16-r32", [1, 2, 2, 70, 32]),
    ("k16v4-g16-r16-s20", [2, 2, 1, 70, 64]),
    ("k4v4-g8-r8-w24", [1, 4, 2, 70, 16]),
    ("kint8v4-g16-r16", [1, 4, 2, 70, 64]),
    // Blocks that are gathered before they are quantized.
    ("k2v2-g16-r16-clip", [1, 4, 2, 70, 64]),
    ("kvn2vvn2-t64-r64", [1, 4, 2, 70, 64]),
    // Keys with the Hadamard transform after rope.
    ("kint8vint8-r16-hadk", [2, 4, 2, 70, 64]),
    ("ke4m3v16-s3-hadk-hadv", [1, 4, 2, 70, 32]),
    ("kmxfp4v4-g16-r16-w24-hadk", [1, 2, 2, 70, 64]),
    ("float", [2, 4, 2, 70, 64]),
    ("float-f16", [1, 4, 2, 70, 64]),
    // Many rows of a head have a kernel of their own; many tokens are split over cubes.
    ("k4v4-g16-r16", [1, 9, 1, 1100, 32]),
];

/// A text of multiples of 1/32 and a table of multiples of 1/8, so that every product and sum of a
/// turn is exact and the order of operations does not matter.
fn exact(name: &str, sizes: [usize; 5], rotary_dim: usize, seed: u64) -> (Setup, Vec<f32>) {
    let mut text = Setup::new(name, sizes, seed);
    for host in [&mut text.query, &mut text.key] {
        host.data.iter_mut().for_each(|x| *x = (*x * 32.0).round() / 32.0);
    }
    let mut rng = Rng::new(seed + 1);
    let table = (0..text.len() * rotary_dim).map(|_| rng.below(17) as f32 / 8.0 - 1.0).collect();
    (text, table)
}

fn table_on<T: Target>(table: &[f32], rotary_dim: usize, on: &On<T>) -> RopeTable {
    let shape = [table.len() / rotary_dim, rotary_dim];
    RopeTable::new(Tensor::from_data(TensorData::new(table.to_vec(), shape), &**on)).unwrap()
}

/// Every token after rope by its position, or by the position that `at` gives for it.
fn apply_rope(rows: &Host, table: &[f32], rotary_dim: usize, at: impl Fn(usize) -> usize) -> Host {
    let [_, _, tokens, head_dim] = rows.shape;
    let half = rotary_dim / 2;
    let mut apply_rope = rows.clone();
    for (i, row) in apply_rope.data.chunks_mut(head_dim).enumerate() {
        let angles = &table[at(i % tokens) * rotary_dim..][..rotary_dim];
        for pair in 0..half {
            let (cos, sin) = (angles[pair], angles[half + pair]);
            let (a, b) = (row[pair], row[pair + half]);
            row[pair] = a * cos - b * sin;
            row[pair + half] = b * cos + a * sin;
        }
    }
    apply_rope
}

fn text_after_rope(text: &Setup, table: &[f32], rotary_dim: usize) -> Setup {
    let apply_rope = |rows| apply_rope(rows, table, rotary_dim, |token| token);
    Setup { query: apply_rope(&text.query), key: apply_rope(&text.key), ..text.clone() }
}

/// The output rows of the tokens from `prefix` on.
fn tail(output: &[f64], text: &Setup, prefix: usize) -> Vec<f64> {
    let head_dim = text.query.shape[3];
    let slices = output.chunks(text.len() * head_dim);
    slices.flat_map(|slice| &slice[prefix * head_dim..]).copied().collect()
}

/// Tokens from a prefix on, one at a time by `step`, against the oracle over tokens after rope and
/// a cache of those.
fn check<T: Target>(
    on: &On<T>,
    step: impl Fn(&mut KvCache, [Tensor<4>; 3], usize, &RopeTable) -> Tensor<4>,
) {
    for (seed, (name, sizes)) in SETUPS.into_iter().enumerate() {
        if name.ends_with("f16") && !on.supports_dtype(DType::F16) {
            skipped("the device has no f16");
            continue;
        }
        // All channels, or some of them.
        for rotary_dim in [sizes[4], sizes[4] / 4 * 2] {
            let (text, table) = exact(name, sizes, rotary_dim, 300 + seed as u64);
            let rope = table_on(&table, rotary_dim, on);
            let expected_text = text_after_rope(&text, &table, rotary_dim);
            let prefix = text.len() - 30;
            let mut expected = text.cache(on);
            attend(&mut expected, &expected_text.tokens(0..prefix), &[prefix], on);
            let mut cache = expected.clone();
            let rest = expected_text.tokens(prefix..text.len());
            let turned = attend(&mut expected, &rest, &[1; 30], on);
            let outputs: Vec<Host> = (prefix..text.len())
                .map(|t| Host::of(step(&mut cache, text.tokens(t..t + 1).on(on), t, &rope)))
                .collect();
            let outputs = Host::cat(&outputs);
            same_contents(format!("{text:?} of {rotary_dim}"), &cache, &expected);
            let turned: Vec<f64> = turned.data.into_iter().map(f64::from).collect();
            let what = format!("{text:?} of {rotary_dim}");
            close(format!("{what}: beside rope before"), &outputs, &turned, CLOSE);
            if name.contains("clip") || name.contains("vn") {
                // The oracle computes ranges and scales in f64, so it may round a code otherwise.
                continue;
            }
            let oracle = tail(&expected_text.reference().output, &text, prefix);
            // Rows of f16 are rounded by the cache and not by the oracle: half of 2^-11 of keys of
            // up to 10.
            let tolerance = if name.ends_with("f16") { 2e-2 } else { CLOSE };
            close(&what, &outputs, &oracle, tolerance);
            let [q, k, v] = expected_text.on(on);
            let parallel = streaming_attention(q, k, v, &text.config).unwrap().output;
            let parallel = Host::of(parallel).tokens(prefix..text.len());
            close(format!("{what}: in parallel"), &parallel, &oracle, tolerance);
        }
    }
}

fn a_counted_token_gets_rope<T: Target>(on: &On<T>) {
    check(on, |cache, [q, k, v], _, rope| {
        assert!(KvMemory::Cached(cache).applies_rope());
        KvMemory::Cached(cache).attend_with_rope(q, k, v, rope, None).unwrap().output
    });
}

fn a_token_at_a_position_gets_rope<T: Target>(on: &On<T>) {
    check(on, |cache, [q, k, v], t, rope| {
        let position = at(&[t as i32], on);
        let memory = KvMemory::At(cache, &position);
        let output = memory.attend_with_rope(q, k, v, rope, None).unwrap().output;
        cache.advance(1).unwrap();
        output
    });
}

fn at<T: Target>(positions: &[i32], on: &On<T>) -> Tensor<1, Int> {
    Tensor::from_data(positions, (&**on, DType::I32))
}

fn sequences_have_positions_of_their_own<T: Target>(on: &On<T>) {
    check_positions(on, "k4v4-g8-r8");
    check_positions(on, "kint8v4-g8-r8-hadk");
}

/// Sequences of different lengths; one of them is skipped where positions are stored.
fn check_positions<T: Target>(on: &On<T>, name: &str) {
    let (text, table) = exact(name, [2, 4, 2, 40, 16], 16, 330);
    let rope = table_on(&table, 16, on);
    let expected_text = text_after_rope(&text, &table, 16);
    let mut filled = text.cache(on);
    attend(&mut filled, &expected_text.tokens(0..30), &[30], on);
    filled.truncate(1, 29).unwrap();
    let [q, k, v] = text.tokens(30..31).on(on);
    // The second sequence is one token behind, so its token gets rope by position 29.
    let apply_rope = |rows: &Host| {
        let [first, second] =
            [30, 29].map(|position| apply_rope(&rows.tokens(30..31), &table, 16, |_| position));
        let half = first.data.len() / 2;
        let data = [&first.data[..half], &second.data[half..]].concat();
        Host { data, shape: first.shape }.on(on)
    };
    let mut expected = filled.clone();
    let output =
        expected.attend(apply_rope(&text.query), apply_rope(&text.key), v.clone()).unwrap().output;
    let output = Host::of(output);

    let mut counted = filled.clone();
    let got = counted.attend_with_rope(q.clone(), k.clone(), v.clone(), &rope).unwrap().output;
    assert_eq!(counted.lens(), [31, 30]);
    assert!(snapshot(&counted) == snapshot(&expected));
    close("counted", &Host::of(got), &output.f64(), CLOSE);

    let mut stored = filled.clone();
    let positions = at(&[30, -1], on);
    let got = stored.attend_at_with_rope(q, k, v, &positions, &rope).unwrap();
    let (got, lse) = (Host::of(got.output), got.lse.into_data());
    let half = got.data.len() / 2;
    let first = Host { data: got.data[..half].to_vec(), shape: got.shape };
    close("stored", &first, &output.f64()[..half], CLOSE);
    assert!(got.data[half..].iter().all(|&x| x == 0.0));
    let lse: Vec<f32> = lse.iter().collect();
    assert!(lse[..4].iter().all(|x| x.is_finite()) && lse[4..] == [f32::NEG_INFINITY; 4]);
}

fn positions_past_the_table_turn_like_its_last<T: Target>(on: &On<T>) {
    let (text, table) = exact("float", [1, 2, 1, 20, 16], 16, 340);
    let short = table_on(&table[..5 * 16], 16, on);
    let mut cache = text.cache(on);
    attend(&mut cache, &text.tokens(0..9), &[9], on);
    let mut expected = cache.clone();
    let token = text.tokens(9..10);
    let apply_rope = |rows: &Host| apply_rope(rows, &table, 16, |_| 4).on(on);
    let v = token.value.on(on);
    let want = expected
        .attend(apply_rope(&token.query), apply_rope(&token.key), v.clone())
        .unwrap()
        .output;
    let [q, k, _] = token.on(on);
    let got = cache.attend_at_with_rope(q.clone(), k.clone(), v.clone(), &at(&[9], on), &short);
    close("at 9", &Host::of(got.unwrap().output), &Host::of(want).f64(), CLOSE);
    // A host that counts knows better.
    let mut counted = text.cache(on);
    attend(&mut counted, &text.tokens(0..9), &[9], on);
    let error = counted.attend_with_rope(q, k, v, &short).unwrap_err().to_string();
    assert!(error.contains("rope has shape [5, 16]: must have a row for position 9"), "{error}");
}

fn wrong_tables_are_refused<T: Target>(on: &On<T>) {
    let zeros = |shape, dtype| Tensor::<2>::zeros(shape, (&**on, dtype));
    for (shape, dtype) in [([0, 4], DType::F32), ([3, 0], DType::F32), ([3, 5], DType::F32)] {
        let error = RopeTable::new(zeros(shape, dtype)).unwrap_err().to_string();
        assert!(error.contains("table has shape") && error.contains("pairs"), "{error}");
    }
    let text = Setup::new("float", [1, 2, 1, 20, 16], 341);
    let mut cache = text.cache(on);
    let before = snapshot(&cache);
    let wide = RopeTable::new(zeros([20, 18], DType::F32)).unwrap();
    let [q, k, v] = text.tokens(0..1).on(on);
    let error = cache.attend_with_rope(q, k, v, &wide).unwrap_err().to_string();
    assert!(error.contains("must cover at most the 16 channels of a key"), "{error}");
    let rope = RopeTable::new(zeros([20, 16], DType::F32)).unwrap();
    let [q, k, v] = text.tokens(0..2).on(on);
    let error = cache.attend_with_rope(q, k, v, &rope).unwrap_err().to_string();
    assert!(error.contains("must be one token"), "{error}");
    let [q, k, v] = text.tokens(0..1).on(on);
    let ragged = KvMemory::Ragged(&mut cache, &[1]);
    assert!(!ragged.applies_rope());
    let error = ragged.attend_with_rope(q, k, v, &rope, None).unwrap_err().to_string();
    assert!(error.contains("apply rope to query and key first"), "{error}");
    assert!(snapshot(&cache) == before, "a refused call wrote");
}
