//! Layers of the gated delta rule against their definition: whole sequences, any partition into
//! calls, and states that are padded, absent, saved or rounded.

use core::ops::Range;

use burn::tensor::{DType, Tensor};
use half::bf16;
use kv_cubecl::{
    CacheFloat, Error, On, Target,
    delta::{DeltaMemory, DeltaPart, DeltaState},
};

use crate::{
    common::{Host, Rng, chunk_sizes, close, equal_bits, sample, sampled, skipped, stamp},
    delta_inputs::{
        Layer, Rule, TOLERANCE, close_states, config, configs, positions, sequence, snapshot,
    },
};

mod errors;
mod operations;
mod wrong;

stamp!(
    whole_sequences_equal_the_definition,
    the_rule_alone_equals_the_definition,
    tokens_one_by_one_equal_the_definition,
    any_partition_gives_the_same_outputs,
    padding_takes_no_part,
    a_position_below_zero_takes_no_part,
    a_position_for_all,
    saved_states_are_restored_bit_for_bit,
    states_in_bf16_are_rounded_after_each_call,
    equal_keys_of_full_strength,
    strong_decays_are_finite,
    bytes_are_allocated_as_planned,
);

/// Lengths around the 64 tokens of a chunk, and one of three chunks.
const TOKENS: [usize; 6] = [1, 2, 63, 64, 65, 130];

fn whole_sequences_equal_the_definition<T: Target>(on: &On<T>) {
    let cases = configs().into_iter().flat_map(|config| TOKENS.map(|tokens| (config, tokens)));
    for (seed, (config, tokens)) in sampled::<T, _>(cases.enumerate()) {
        let batch = 1 + 2 * ((seed + seed / TOKENS.len()) % 2);
        let layer = Layer::new(config, batch, tokens, 700 + seed as u64);
        let (want, _) = layer.expected(&layer.f64());
        close(format!("{layer:?}"), &layer.parallel(on), &want, TOLERANCE);
    }
}

fn the_rule_alone_equals_the_definition<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(760);
    for tokens in TOKENS {
        let mut rule = Rule::new(rng, [2, 3, tokens], [16, 8]);
        // One head forgets everything at once, and another one learns nothing.
        rule.parts[3].data[tokens..2 * tokens].fill(-3000.0);
        rule.parts[4].data[2 * tokens..3 * tokens].fill(0.0);
        for with_state in [false, true] {
            let mut parts = rule.parts.clone().map(|part| part.f64());
            if !with_state {
                parts[5].fill(0.0);
            }
            let inputs = rule.parts.clone().map(|part| part.on(on));
            let got = Host::of(rule.output(inputs, with_state));
            let what = format!("{tokens} tokens, state {with_state}");
            close(what, &got, &rule.expected(&parts), TOLERANCE);
        }
    }
}

fn tokens_one_by_one_equal_the_definition<T: Target>(on: &On<T>) {
    for (seed, config) in sampled::<T, _>(configs().into_iter().enumerate()) {
        let rng = &mut Rng::new(780 + seed as u64);
        let layer = Layer::new(config, 1 + seed % 3, 1, 790 + seed as u64);
        let mut state = layer.state(on);
        let mut oracles = vec![layer.oracle(); layer.batch()];
        for t in 0..70 {
            let next = layer.with_tokens(rng, layer.batch(), 1);
            let got = next.mix(DeltaMemory::Cached(&mut state), 0..1, on);
            let want = next.push(&mut oracles, &vec![1; layer.batch()]).concat();
            let what = format!("{layer:?}, token {t}");
            close(&what, &got, &want, TOLERANCE);
            if t < 5 || t == 69 {
                close_states(&what, &state, &oracles, TOLERANCE);
            }
        }
    }
}

fn any_partition_gives_the_same_outputs<T: Target>(on: &On<T>) {
    let (rounds, first) = sample(if T::NAME == "flex" { 100 } else { 8 });
    let configs = configs();
    let layers: Vec<_> = (0..configs.len().min(rounds as usize))
        .map(|i| {
            let layer = Layer::new(configs[i], 2, 150, 800 + i as u64);
            let (_, oracles) = layer.expected(&layer.f64());
            let whole = layer.parallel(on).f64();
            (layer, whole, oracles)
        })
        .collect();
    for round in 0..rounds as usize {
        let (layer, want, oracles) = &layers[round % layers.len()];
        let seed = first + round as u64;
        let sizes = chunk_sizes(&mut Rng::new(seed), 150, 90);
        let (mut state, mut outputs, mut start) = (layer.state(on), Vec::new(), 0);
        for &size in &sizes {
            let memory = DeltaMemory::Cached(&mut state);
            outputs.push(layer.mix(memory, start..start + size, on));
            start += size;
        }
        let what = format!("{layer:?} in {sizes:?}, KV_SEED={seed}");
        close(&what, &Host::cat(&outputs), want, TOLERANCE);
        close_states(&what, &state, oracles, TOLERANCE);
    }
}

/// Tokens of each sequence, call by call: none, a token, some, a chunk and more, all the same.
const CALLS: [[usize; 4]; 9] = [
    [3, 0, 12, 1],
    [2, 2, 2, 2],
    [1, 1, 0, 1],
    [0, 9, 1, 70],
    [1, 1, 1, 1],
    [0, 0, 0, 0],
    [65, 0, 0, 8],
    [0, 64, 25, 0],
    [2, 2, 2, 2],
];

fn padding_takes_no_part<T: Target>(on: &On<T>) {
    for (seed, config) in sampled::<T, _>(configs().into_iter().enumerate()) {
        // Squares of the first number overflow.
        for fill in [1e30, f32::NAN] {
            let rng = &mut Rng::new(820 + seed as u64);
            let layer = Layer::new(config, 4, 1, 830 + seed as u64);
            let mut state = layer.state(on);
            let mut oracles = vec![layer.oracle(); 4];
            for (call, counts) in CALLS.iter().enumerate() {
                // In every other call, all sequences are padded.
                let n = (counts.iter().max().unwrap() + call % 2).max(1);
                let mut next = layer.with_tokens(rng, 4, n);
                let want = next.push(&mut oracles, counts);
                next.pad(counts, fill);
                let before = state.clone();
                let got = next.mix(DeltaMemory::Ragged(&mut state, counts), 0..n, on);
                let what = format!("{layer:?}, call {call}, padded with {fill}");
                for (i, &n) in counts.iter().enumerate() {
                    if n > 0 {
                        let got = sequence(&got, i).tokens(0..n);
                        close(format!("{what}: {i}"), &got, &want[i], TOLERANCE);
                        continue;
                    }
                    let [after, before] = [&state, &before].map(|state| state.select(&[i]));
                    let same = snapshot(&after.unwrap()) == snapshot(&before.unwrap());
                    assert!(same, "{what}: sequence {i} changed");
                }
                close_states(&what, &state, &oracles, TOLERANCE);
            }
        }
    }
}

fn a_position_below_zero_takes_no_part<T: Target>(on: &On<T>) {
    for (seed, config) in sampled::<T, _>(configs().into_iter().enumerate()) {
        let rng = &mut Rng::new(840 + seed as u64);
        let layer = Layer::new(config, 3, 20, 850 + seed as u64);
        let (_, oracles) = layer.expected(&layer.f64());
        let mut state = layer.state(on);
        layer.mix(DeltaMemory::Cached(&mut state), 0..20, on);
        let before = snapshot(&state.select(&[1]).unwrap());
        for absent in [-1, i32::MIN] {
            // The token of the sequence that takes no part is not read.
            let mut next = layer.with_tokens(rng, 3, 1);
            next.pad(&[1, 0, 1], f32::NAN);
            let (mut at, mut cached) = (state.clone(), state.clone());
            let position = positions(&[20, absent, 20], on);
            let got = next.mix(DeltaMemory::At(&mut at, &position), 0..1, on);
            let appended = next.mix(DeltaMemory::Cached(&mut cached), 0..1, on);
            let what = format!("{layer:?}, position {absent}");
            assert_eq!((at.lens(), cached.lens()), (&[20; 3][..], &[21; 3][..]), "{what}");
            assert!(sequence(&got, 1).data.iter().all(|&x| x == 0.0), "{what}: output {got:?}");
            let after = snapshot(&at.select(&[1]).unwrap());
            assert!(after == before, "{what}: the state changed");

            let mut expected = oracles.clone();
            let want = next.push(&mut expected, &[1, 0, 1]);
            for i in [0, 2] {
                let got = sequence(&got, i);
                close(format!("{what}: {i}"), &got, &want[i], TOLERANCE);
                close(format!("{what}: {i}"), &got, &sequence(&appended, i).f64(), TOLERANCE);
            }
            // Each sequence continues from what it took part in.
            let mut taking = at.select(&[0, 2]).unwrap();
            taking.advance(1).unwrap();
            let taken = [expected[0].clone(), expected[2].clone()];
            close_states(&what, &taking, &taken, TOLERANCE);
            let later = layer.with_tokens(rng, 3, 2);
            let got = later.mix(DeltaMemory::Cached(&mut at), 0..2, on);
            let want = later.push(&mut expected, &[2; 3]);
            close(format!("{what}: later"), &got, &want.concat(), TOLERANCE);
        }
    }
}

fn a_position_for_all<T: Target>(on: &On<T>) {
    let layer = Layer::new(config(2, 4, [16, 24], 4), 3, 20, 860);
    let rng = &mut Rng::new(861);
    let (_, mut oracles) = layer.expected(&layer.f64());
    let mut state = layer.state(on);
    layer.mix(DeltaMemory::Cached(&mut state), 0..20, on);
    for t in 20..30 {
        let mut next = layer.with_tokens(rng, 3, 1);
        let want = next.push(&mut oracles, &[1; 3]).concat();
        let position = positions(&[t], on);
        let got = next.mix(DeltaMemory::At(&mut state, &position), 0..1, on);
        close(format!("{layer:?}, position {t}"), &got, &want, TOLERANCE);
        state.advance(1).unwrap();
        close_states(format!("{layer:?}, position {t}"), &state, &oracles, TOLERANCE);

        let before = snapshot(&state);
        next.pad(&[0; 3], f32::NAN);
        let absent = positions(&[-1], on);
        let got = next.mix(DeltaMemory::At(&mut state, &absent), 0..1, on);
        assert!(got.data.iter().all(|&x| x == 0.0), "{layer:?}: {got:?}");
        assert!(snapshot(&state) == before, "{layer:?}: a state changed");
    }
}

fn saved_states_are_restored_bit_for_bit<T: Target>(on: &On<T>) {
    let cases = configs().into_iter().flat_map(|config| {
        [CacheFloat::F32, CacheFloat::Bf16].map(|float| config.with_float(float))
    });
    for (seed, config) in sampled::<T, _>(cases.enumerate()) {
        if !on.supports_dtype(config.float.dtype()) {
            skipped(config.float.name());
            continue;
        }
        let layer = Layer::new(config, 3, 90, 870 + seed as u64);
        let mut state = layer.state(on);
        layer.mix(DeltaMemory::Ragged(&mut state, &[37, 0, 2]), 0..37, on);
        let (conv, matrices) = state.parts();
        let layouts = config.parts(3).unwrap();
        let bytes: usize = layouts
            .iter()
            .map(|part| part.shape.iter().product::<usize>() * part.dtype.size())
            .sum();
        assert_eq!(bytes, config.memory_bytes(3).unwrap());
        let last = layouts.last().unwrap();
        assert_eq!((last.name, last.dtype), (DeltaPart::State.name(), config.float.dtype()));
        assert_eq!((last.shape.as_slice(), last.dtype), (&matrices.dims()[..], matrices.dtype()));

        let restore = |matrices: Tensor<4>| {
            DeltaState::from_parts(&config, state.lens().to_vec(), conv.clone(), matrices, on)
        };
        // Restored tensors may share memory with the state, or come from a file.
        let data = matrices.clone().into_data();
        let read = Tensor::<4>::from_data(data, (&**on, config.float.dtype()));
        for restored in [restore(matrices), restore(read)] {
            let (mut state, mut restored) = (state.clone(), restored.unwrap());
            assert!(snapshot(&restored) == snapshot(&state), "{layer:?}");
            let mut both = |tokens: Range<usize>| {
                [&mut restored, &mut state]
                    .map(|state| layer.mix(DeltaMemory::Cached(state), tokens.clone(), on))
            };
            let [got, want] = both(37..38);
            equal_bits(format!("{layer:?}"), &got.data, &want.data);
            let [got, want] = both(38..90);
            close(format!("{layer:?}"), &got, &want.f64(), TOLERANCE);
        }
    }
}

/// A stored number is the one nearest to the oracle's, up to the error of f32. The oracle then
/// continues from the stored numbers, because a number near the middle of two may be rounded to
/// either.
fn states_in_bf16_are_rounded_after_each_call<T: Target>(on: &On<T>) {
    for (seed, config) in sampled::<T, _>(configs().into_iter().enumerate()) {
        let config = config.with_float(CacheFloat::Bf16);
        if !on.supports_dtype(DType::BF16) {
            let error = DeltaState::new(&config, 2, on).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            return skipped("bf16");
        }
        let rng = &mut Rng::new(890 + seed as u64);
        let layer = Layer::new(config, 2, 1, 900 + seed as u64);
        let mut state = layer.state(on);
        let mut oracles = vec![layer.oracle(); 2];
        for (call, n) in [1, 1, 1, 5, 1, 64, 1, 70, 2, 1].into_iter().enumerate() {
            let next = layer.with_tokens(rng, 2, n);
            let got = next.mix(DeltaMemory::Cached(&mut state), 0..n, on);
            let want = next.push(&mut oracles, &[n; 2]).concat();
            let what = format!("{layer:?}, call {call} of {n} tokens");
            close(&what, &got, &want, TOLERANCE);
            let matrices = state.parts().1;
            assert_eq!(matrices.dtype(), DType::BF16);
            let stored = Host::of(matrices);
            for (i, oracle) in oracles.iter_mut().enumerate() {
                let (got, exact) = (sequence(&stored, i).f64(), oracle.states());
                let largest = exact.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
                for (index, (got, exact)) in got.iter().zip(&exact).enumerate() {
                    let nearest = bf16::from_f64(*exact).to_f64();
                    let allowed = (nearest - exact).abs() + TOLERANCE * largest;
                    let error = (got - exact).abs();
                    assert!(error <= allowed, "{what}: {i}: {index} is {got}, not {nearest}");
                }
                oracle.set_states(&got);
            }
        }
    }
}

/// With equal keys of strength 1 and without decay, powers of the matrix of a chunk have entries up
/// to 1e18, although each output is a value. The rounding errors of all tokens add up in one
/// direction of the state, so the tolerance is five times that of random keys.
fn equal_keys_of_full_strength<T: Target>(on: &On<T>) {
    let configs = [config(1, 2, [16, 16], 2), config(2, 2, [8, 24], 2), config(1, 1, [128, 16], 2)];
    for (seed, config) in configs.into_iter().enumerate() {
        for tokens in [64, 65, 150] {
            let mut layer = Layer::new(config, 2, tokens, 920 + seed as u64);
            let keys = config.key_channels()..2 * config.key_channels();
            // The first tokens have other keys, so that the state has more than one direction.
            let same: Vec<f32> = layer.parts[0].data[keys.clone()].to_vec();
            layer.each_mixed(|_, token, row| {
                if token >= 5 {
                    row[keys.clone()].copy_from_slice(&same);
                }
            });
            layer.each_rates(|_, token, row| {
                let (logits, times) = row.split_at_mut(config.n_value_heads);
                times.fill(-20.0);
                if token >= 5 {
                    logits.fill(20.0);
                }
            });
            let (want, oracles) = layer.expected(&layer.f64());
            close(format!("{layer:?}"), &layer.parallel(on), &want, 1e-4);
            let mut state = layer.state(on);
            let got = layer.mix(DeltaMemory::Cached(&mut state), 0..tokens, on);
            close(format!("{layer:?}, cached"), &got, &want, 1e-4);
            close_states(format!("{layer:?}"), &state, &oracles, 1e-4);
        }
    }
}

/// The logarithms of decays add up to thousands in a chunk, where neighbors among f32 numbers are
/// 1e-4 apart and more. The decay between two tokens may have ten times that error. Where all
/// decays are 0, their errors do not matter.
fn strong_decays_are_finite<T: Target>(on: &On<T>) {
    for (seed, config) in sampled::<T, _>(configs().into_iter().enumerate()) {
        for (all, tolerance) in [(true, TOLERANCE), (false, 1e-3)] {
            let mut layer = Layer::new(config, 1, 130, 940 + seed as u64);
            if all {
                layer.parts[3].data.fill(3.0);
                layer.parts[4].data.fill(0.0);
            }
            layer.each_rates(|_, token, row| {
                let times = &mut row[config.n_value_heads..];
                times.fill(if all || token.is_multiple_of(3) { 30.0 } else { -5.0 });
            });
            let (want, oracles) = layer.expected(&layer.f64());
            let what = format!("{layer:?}, all tokens {all}");
            close(&what, &layer.parallel(on), &want, tolerance);
            let mut state = layer.state(on);
            let got = layer.mix(DeltaMemory::Cached(&mut state), 0..130, on);
            close(&what, &got, &want, tolerance);
            close_states(&what, &state, &oracles, tolerance);
        }
    }
}

fn bytes_are_allocated_as_planned<T: Target>(on: &On<T>) {
    let published = config(16, 48, [128, 128], 4);
    for config in configs().into_iter().chain([published]) {
        for batch in [1, 3] {
            let state = DeltaState::new(&config, batch, on).unwrap();
            assert_eq!(state.memory_bytes(), config.memory_bytes(batch).unwrap(), "{config:?}");
            assert_eq!((state.lens(), state.len()), (&vec![0; batch][..], 0));
            assert!(state.is_empty());
        }
    }
}

/// Qwen3.5-27B has 48 layers of linear attention: 16 key heads and 48 value heads of 128 channels,
/// and a convolution over 4 tokens.
#[test]
fn bytes_of_a_published_layer() {
    let layer = config(16, 48, [128, 128], 4);
    let (state, conv) = (48 * 128 * 128, 3 * (2 * 16 * 128 + 48 * 128));
    assert_eq!(layer.memory_bytes(1).unwrap(), 4 * state + 4 * conv);
    assert_eq!(48 * layer.memory_bytes(1).unwrap(), 156_893_184);
    assert_eq!(layer.memory_bytes(7).unwrap(), 7 * (4 * state + 4 * conv));
    let halves = layer.with_float(CacheFloat::Bf16);
    assert_eq!(halves.memory_bytes(2).unwrap(), 2 * (2 * state + 4 * conv));
}
