//! Decode steps (`attend_at`) for which only the device knows the length, and their graph capture.

use std::{cell::RefCell, rc::Rc};

use burn::tensor::{DType, Device, Int, Tensor, TensorData, capture, kind::Basic};
use kv_cubecl::{Error, KvCache, On, Target};

use crate::common::{CLOSE, Host, Setup, attend, check_properties, close, setups, snapshot, stamp};

stamp!(
    the_device_holds_the_length,
    any_length_on_the_device,
    a_full_cache_is_read_and_not_written,
    a_captured_step_serves_every_length,
    wrong_tokens_and_positions,
    only_steps_are_counted,
    steps_of_some_sequences_are_counted,
);

const NAMES: [&str; 6] = [
    "k2v2-g16-r16",
    "k4v2-g16-r32-s3-after",
    "k8v16-g16-r32",
    "k16v4-g16-r16-s20",
    "kint8vint8-s3",
    "float",
];

fn at(position: usize, device: &Device) -> Tensor<1, Int> {
    Tensor::from_data([position as i32], (device, DType::I32))
}

/// Attends with the tokens from `prefix` on one at a time, the positions given on the device;
/// compares outputs with the oracle and the cache with one filled by `attend`.
#[track_caller]
pub(crate) fn check<T: Target>(on: &On<T>, text: &Setup, prefix: usize) {
    let mut expected = text.cache(on);
    let mut cache = text.cache(on);
    if prefix > 0 {
        attend(&mut expected, &text.tokens(0..prefix), &[prefix], on);
        attend(&mut cache, &text.tokens(0..prefix), &[prefix], on);
    }
    let rest = text.tokens(prefix..text.len());
    attend(&mut expected, &rest, &vec![1; rest.len()], on);
    let mut outputs = Vec::new();
    for t in 0..rest.len() {
        let [q, k, v] = rest.tokens(t..t + 1).on(on);
        outputs.push(Host::of(cache.attend_at(q, k, v, &at(prefix + t, on)).unwrap().output));
        assert_eq!(cache.len(), prefix, "{text:?}: the host does not count it");
    }
    cache.advance(rest.len()).unwrap();
    assert!(snapshot(&cache) == snapshot(&expected), "{text:?}: codes differ");
    let oracle = tail(&text.reference().output, text, prefix);
    close(format!("{text:?} from {prefix}"), &Host::cat(&outputs), &oracle, CLOSE);
}

/// The output rows of the tokens from `prefix` on.
fn tail(output: &[f64], text: &Setup, prefix: usize) -> Vec<f64> {
    let head_dim = text.query.shape[3];
    let slices = output.chunks(text.len() * head_dim);
    slices.flat_map(|slice| &slice[prefix * head_dim..]).copied().collect()
}

fn the_device_holds_the_length<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [2, 4, 2, 70, 64], 200 + seed as u64);
        for prefix in [0, 45] {
            check(on, &text, prefix);
        }
    }
}

fn any_length_on_the_device<T: Target>(on: &On<T>) {
    check_properties(6, setups(), |text| check(on, &text, text.len() / 2));
}

fn a_full_cache_is_read_and_not_written<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [1, 4, 2, 50, 64], 220 + seed as u64);
        let expected = tail(&text.reference().output, &text, 49);
        let mut cache = text.cache(on);
        attend(&mut cache, &text, &[50], on);
        let before = snapshot(&cache);
        for position in [50, 51, 1 << 20, i32::MAX as usize] {
            let [q, k, v] = text.tokens(49..50).on(on);
            let other = Host::normal(&mut crate::common::Rng::new(1), text.tokens(0..1).key.shape);
            let output = cache.attend_at(q, k + other.on(on), v, &at(position, on)).unwrap().output;
            close(format!("{text:?} at {position}"), &Host::of(output), &expected, CLOSE);
            assert!(snapshot(&cache) == before, "{text:?}: a full cache was written");
        }
        assert_eq!(
            cache.advance(1).unwrap_err(),
            Error::CapacityExceeded { len: 50, added: 1, capacity: 50 }
        );
    }
}

/// Overwrites the buffer of `tensor` with `values`.
fn overwrite<const D: usize, K: Basic>(tensor: &mut Tensor<D, K>, values: Tensor<D, K>) {
    let all = values.dims().map(|n| 0..n);
    tensor.inplace(|tensor| tensor.slice_assign(all, values));
}

/// All tensors that a captured step reads and writes.
struct Bound {
    cache: KvCache,
    inputs: [Tensor<4>; 3],
    position: Tensor<1, Int>,
}

fn a_captured_step_serves_every_length<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().enumerate() {
        let text = Setup::new(name, [1, 4, 2, 70, 64], 240 + seed as u64);
        let mut expected = text.cache(on);
        attend(&mut expected, &text, &vec![1; 70], on);

        let mut cache = text.cache(on);
        attend(&mut cache, &text.tokens(0..20), &[20], on);
        // Capture runs the step, so it starts at a position past the capacity, where nothing is
        // written.
        let inputs = text.tokens(0..1).on(on);
        let bound = Rc::new(RefCell::new(Bound { cache, inputs, position: at(70, on) }));
        let held = bound.clone();
        let mut graph = capture(on, move || {
            let Bound { cache, inputs: [q, k, v], position } = &mut *held.borrow_mut();
            let output = cache.attend_at(q.clone(), k.clone(), v.clone(), position).unwrap().output;
            position.inplace(|position| position + 1);
            output
        });
        overwrite(&mut bound.borrow_mut().position, at(20, on));
        let mut outputs = Vec::new();
        for t in 20..70 {
            {
                let bound = &mut *bound.borrow_mut();
                let new = text.tokens(t..t + 1).on(on);
                for (input, new) in bound.inputs.iter_mut().zip(new) {
                    overwrite(input, new);
                }
            }
            // SAFETY: everything that the step reads and writes is in `bound` or owned by the
            // closure, and only this thread uses it.
            let output = unsafe { graph.replay() };
            outputs.push(Host::of(output.clone()));
        }
        let mut cache = bound.borrow().cache.clone();
        cache.advance(50).unwrap();
        assert!(snapshot(&cache) == snapshot(&expected), "{text:?}: codes differ");
        let oracle = tail(&text.reference().output, &text, 20);
        close(format!("{text:?}"), &Host::cat(&outputs), &oracle, CLOSE);
        // WGPU and CUDA capture their launches; without this check a fallback would go
        // unnoticed.
        assert_eq!(graph.is_hardware(), T::NAME != "flex", "{text:?}");
    }
}

fn wrong_tokens_and_positions<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [1, 4, 2, 20, 64], 260);
    let mut cache = text.cache(on);
    let before = snapshot(&cache);
    let message = |result: kv_cubecl::Result<kv_cubecl::Attention>| result.unwrap_err().to_string();
    let [q, k, v] = text.tokens(0..2).on(on);
    let two = message(cache.attend_at(q, k, v, &at(0, on)));
    assert!(two.contains("key has shape [1, 2, 2, 64]: must be one token"), "{two}");
    for (position, part) in [
        (Tensor::from_data([0, 1], (&**on, DType::I32)), "position has shape [2]"),
        (Tensor::from_data([0], (&**on, DType::U32)), "not of U32"),
    ] {
        let [q, k, v] = text.tokens(0..1).on(on);
        let wrong = message(cache.attend_at(q, k, v, &position));
        assert!(wrong.contains("must be [1] of I32") && wrong.contains(part), "{wrong}");
    }
    assert!(snapshot(&cache) == before, "a refused call wrote");
}

/// `advance` is refused for caches that never took a step, as it would count memory that was never
/// written.
fn only_steps_are_counted<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [1, 4, 2, 20, 64], 261);
    let refused = |cache: &mut KvCache| {
        let len = cache.len();
        let error = cache.advance(3).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("advance: 3 tokens"), "{error}");
        assert_eq!(cache.len(), len);
        assert_eq!(cache.advance(0), Ok(()));
    };
    let mut cache = text.cache(on);
    refused(&mut cache);
    attend(&mut cache, &text, &[10], on);
    refused(&mut cache);
    let parts = cache.clone().into_parts();
    refused(&mut KvCache::from_parts(&text.config, text.shape(), parts).unwrap());

    let [q, k, v] = text.tokens(10..11).on(on);
    cache.attend_at(q, k, v, &at(10, on)).unwrap();
    cache.advance(1).unwrap();
    assert_eq!(cache.len(), 11);
}

/// A step that skips a sequence counts only the tokens of the others.
fn steps_of_some_sequences_are_counted<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g16-r16", [2, 4, 2, 12, 64], 262);
    let mut cache = text.cache(on);
    attend(&mut cache, &text, &[10], on);
    let [q, k, v] = text.tokens(10..11).on(on);
    let position = Tensor::from_data(TensorData::new(vec![10i32, -1], [2]), (&**on, DType::I32));
    cache.attend_at(q, k, v, &position).unwrap();
    for (tokens, part) in [
        (&[1][..], "tokens has shape [1]: must be one number for each sequence of batch 2"),
        (&[3, 0], "3 tokens do not fit: sequence 0 holds 10 of capacity 12"),
    ] {
        let error = cache.advance_ragged(tokens).unwrap_err().to_string();
        assert!(error.contains(part), "{tokens:?}: {error}");
        assert_eq!(cache.lens(), [10, 10]);
    }
    cache.advance_ragged(&[1, 0]).unwrap();
    assert_eq!(cache.lens(), [11, 10]);
}
