//! Views of larger or differently ordered buffers as inputs: every operation gives, bit for bit,
//! what it gives for a contiguous copy.

use burn::tensor::{DType, Device, Int, Slice, Tensor, kind::Basic};
use kv_cubecl::{
    CacheParts, Granularity, KvCache, KvFormat, On, Target, fake_quantize, quantize,
    streaming_attention,
};

use crate::common::{Host, Setup, attend, equal_bits, snapshot, stamp};

stamp!(
    views_are_quantized,
    views_are_attended_to_in_parallel,
    views_are_cached,
    views_are_positions,
    views_are_parts_of_a_cache,
    one_row_for_all_is_parts_of_a_cache,
);

/// A contiguous copy of `tensor` in a buffer of its own.
fn copy<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Tensor<D, K> {
    let (device, dtype) = (tensor.device(), tensor.dtype());
    Tensor::from_data(tensor.clone().into_data(), (&device, dtype))
}

/// A tensor and the buffer it is a view of.
struct View<const D: usize, K: Basic> {
    what: String,
    whole: Tensor<D, K>,
    view: Tensor<D, K>,
}

/// Views that show the numbers of `tensor`: parts of larger buffers, reversed axes, and every
/// second element.
fn parts_and_strides<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Vec<View<D, K>> {
    let mut views = Vec::new();
    for axis in 0..D {
        let len = tensor.dims()[axis];
        // Between other numbers; the view starts after one row, or after as many rows as it has.
        let other = copy(&tensor.clone().flip([0]).flip([D - 1]));
        for before in [1, len] {
            let around = other.clone().narrow(axis, 0, before);
            let whole = Tensor::cat(vec![around, tensor.clone(), other.clone()], axis);
            let view = whole.clone().narrow(axis, before, len);
            views.push(View { what: format!("rows {before}.. of axis {axis}"), whole, view });
        }
        let whole = copy(&tensor.clone().flip([axis]));
        let view = whole.clone().flip([axis]);
        views.push(View { what: format!("axis {axis} backwards"), whole, view });

        let rows = (0..len).flat_map(|i| [tensor, &other].map(|x| x.clone().narrow(axis, i, 1)));
        let whole = Tensor::cat(rows.collect(), axis);
        let mut slices = [Slice::full(); D];
        slices[axis] = Slice::new(0, None, 2);
        let view = whole.clone().slice(slices);
        views.push(View { what: format!("every second of axis {axis}"), whole, view });
    }
    views
}

/// [`parts_and_strides`], and views with permuted axes.
fn views(tensor: &Tensor<4>) -> Vec<View<4, burn::tensor::Float>> {
    let mut views = parts_and_strides(tensor);
    for (order, back) in [
        ([0, 2, 1, 3], [0, 2, 1, 3]),
        ([0, 1, 3, 2], [0, 1, 3, 2]),
        ([3, 2, 1, 0], [3, 2, 1, 0]),
        ([2, 0, 3, 1], [1, 3, 0, 2]),
    ] {
        let whole = copy(&tensor.clone().permute(order));
        let view = whole.clone().permute(back);
        views.push(View { what: format!("axes stored as {order:?}"), whole, view });
    }
    for view in &views {
        let shown = Host::of(view.view.clone());
        assert_eq!(shown, Host::of(tensor.clone()), "{}: the test's own view", view.what);
    }
    views
}

/// For each axis, `tensor` with its first entry along the axis repeated, by a stride of 0.
fn broadcast(tensor: &Tensor<4>) -> impl Iterator<Item = (String, Tensor<4>)> {
    (0..4).filter(|&axis| tensor.dims()[axis] > 1).map(|axis| {
        let first = copy(&tensor.clone().narrow(axis, 0, 1));
        (format!("the first of axis {axis}"), first.expand(tensor.dims()))
    })
}

/// Triples of query, key and value, each one of the views that [`views`] and [`broadcast`] make of
/// it.
fn inputs(tensors: &[Tensor<4>; 3]) -> Vec<(String, [Tensor<4>; 3])> {
    let all: Vec<Vec<(String, Tensor<4>)>> = tensors
        .iter()
        .map(|tensor| {
            let views = views(tensor).into_iter().map(|view| (view.what, view.view));
            views.chain(broadcast(tensor)).collect()
        })
        .collect();
    let longest = all.iter().map(Vec::len).max().unwrap();
    (0..longest)
        .map(|i| {
            let [q, k, v] = [0, 1, 2].map(|side| all[side][i % all[side].len()].clone());
            (format!("query {}, key {}, value {}", q.0, k.0, v.0), [q.1, k.1, v.1])
        })
        .collect()
}

fn text(name: &str) -> Setup {
    Setup::new(name, [2, 4, 2, 48, 16], 300)
}

fn views_are_quantized<T: Target>(on: &On<T>) {
    let tensor = text("k2v2-g16-r16").key.on(on);
    let views = views(&tensor).into_iter().map(|view| (view.what, view.view));
    for (what, view) in views.chain(broadcast(&tensor)) {
        let plain = copy(&view);
        for granularity in [Granularity::PerChannel, Granularity::PerToken] {
            let all = |x: &Tensor<4>| {
                let packed = quantize(x.clone(), granularity, KvFormat::Affine4, 8).unwrap();
                let fake = fake_quantize(x.clone(), granularity, KvFormat::Affine4, 8).unwrap();
                (packed.to_logical(), Host::of(packed.dequantize()), Host::of(fake))
            };
            assert!(all(&view) == all(&plain), "{what}: {granularity:?}");
        }
    }
}

fn views_are_attended_to_in_parallel<T: Target>(on: &On<T>) {
    let text = text("k4v2-g16-r16-s1");
    for (what, inputs) in inputs(&text.on(on)) {
        let all = |[q, k, v]: [Tensor<4>; 3]| {
            Host::of(streaming_attention(q, k, v, &text.config).unwrap().output)
        };
        let plain = all(inputs.each_ref().map(copy));
        equal_bits(what, &all(inputs).data, &plain.data);
    }
}

/// Outputs of every way into a cache: a chunk into an empty one, a chunk into a filled one, single
/// tokens with the length on the host and on the device, and `peek` and `append`.
fn run(cache: &mut KvCache, [q, k, v]: &[Tensor<4>; 3]) -> Vec<Host> {
    let mut outputs = Vec::new();
    let part = |start: usize, len: usize| [q, k, v].map(|x| x.clone().narrow(2, start, len));
    for (start, len) in [(0, 19), (19, 15), (34, 1)] {
        let [q, k, v] = part(start, len);
        outputs.push(cache.peek(q.clone(), k.clone(), v.clone()).unwrap().output);
        outputs.push(cache.attend(q, k, v).unwrap().output);
    }
    let [_, k, v] = part(35, 11);
    cache.append(k, v).unwrap();
    let position = Tensor::from_data([46], (&q.device(), DType::I32));
    let [q, k, v] = part(46, 1);
    outputs.push(cache.attend_at(q, k, v, &position).unwrap().output);
    cache.advance(1).unwrap();
    outputs.into_iter().map(Host::of).collect()
}

fn views_are_cached<T: Target>(on: &On<T>) {
    for name in ["k2v2-g16-r16-s1", "float"] {
        let text = text(name);
        for (what, inputs) in inputs(&text.on(on)) {
            let (mut cache, mut plain) = (text.cache(on), text.cache(on));
            let got = run(&mut cache, &inputs);
            let expected = run(&mut plain, &inputs.each_ref().map(copy));
            for (call, (got, expected)) in got.iter().zip(&expected).enumerate() {
                equal_bits(format!("{name}: output {call}: {what}"), &got.data, &expected.data);
            }
            assert!(snapshot(&cache) == snapshot(&plain), "{name}: {what}");
        }
    }
}

fn views_are_positions<T: Target>(on: &On<T>) {
    let at = |positions: &[i32]| Tensor::<1, Int>::from_data(positions, (&**on, DType::I32));
    let mut several: Vec<i32> = (0..200).collect();
    several[64] = 20;
    let position = at(&[20]);
    let views = [
        ("the 21st of many", at(&several).narrow(0, 20, 1)),
        ("the 65th of many", at(&several).narrow(0, 64, 1)),
        ("the first of many", at(&[20, 1, 2]).narrow(0, 0, 1)),
        ("the last of some backwards", at(&[20, 1, 2]).flip([0]).narrow(0, 2, 1)),
        (
            "one of a column",
            at(&[0, 1, 20, 3]).reshape([2, 2]).narrow(1, 0, 1).narrow(0, 1, 1).reshape([1]),
        ),
    ];
    for name in ["k2v2-g16-r16-s1", "float"] {
        let text = text(name);
        let step = |position: &Tensor<1, Int>| {
            let mut cache = text.cache(on);
            attend(&mut cache, &text.tokens(0..20), &[20], on);
            let [q, k, v] = text.tokens(20..21).on(on);
            let output = Host::of(cache.attend_at(q, k, v, position).unwrap().output);
            (output, snapshot(&cache))
        };
        let expected = step(&position);
        for (what, view) in &views {
            assert!(step(view) == expected, "{name}: position is {what}");
        }
    }
}

/// Bytes of a tensor, to see whether anything wrote to it.
fn bytes<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Vec<u8> {
    tensor.clone().into_data().as_bytes().to_vec()
}

/// Builds a cache from `parts` and continues `text` at token `start`: the outputs, and what the
/// cache then holds.
fn go_on(text: &Setup, parts: CacheParts, start: usize, on: &Device) -> (Vec<Host>, [Vec<u8>; 4]) {
    let mut cache = KvCache::from_parts(&text.config, text.shape(), parts).unwrap();
    let mut outputs = Vec::new();
    for (start, len) in [(start, 1), (start + 1, 5), (start + 6, 1)] {
        let [q, k, v] = text.tokens(start..start + len).on(on);
        // Read before anything is written, too.
        outputs.push(Host::of(cache.peek(q.clone(), k.clone(), v.clone()).unwrap().output));
        outputs.push(Host::of(cache.attend(q, k, v).unwrap().output));
    }
    (outputs, snapshot(&cache))
}

fn views_are_parts_of_a_cache<T: Target>(on: &On<T>) {
    let mut names = vec!["k2v2-g16-r16-s1", "k4v16-g16-r16-after", "float"];
    if on.supports_dtype(DType::F16) {
        names.push("k2v2-g16-r16-f16");
    }
    for name in names {
        let text = text(name);
        // Where keys are quantized, one of the next two tokens flushes a window of them.
        let start = 31 + text.config.sink_tokens;
        let mut cache = text.cache(on);
        attend(&mut cache, &text, &[start], on);
        let parts = cache.into_parts();
        let plain = || CacheParts {
            keys: copy(&parts.keys),
            values: copy(&parts.values),
            floats: copy(&parts.floats),
            lens: parts.lens.clone(),
        };
        let expected = go_on(&text, plain(), start, on);
        let check = |what: &str, parts: CacheParts| {
            assert!(go_on(&text, parts, start, on) == expected, "{text:?}: {what}");
        };
        let (keys, values) = (parts_and_strides(&parts.keys), parts_and_strides(&parts.values));
        for (keys, values) in keys.into_iter().zip(values) {
            let before = [bytes(&keys.whole), bytes(&values.whole)];
            let (what, view) = (format!("keys are {}", keys.what), keys.view);
            check(&what, CacheParts { keys: view, ..plain() });
            let (what, view) = (format!("values are {}", values.what), values.view);
            check(&what, CacheParts { values: view, ..plain() });
            let after = [bytes(&keys.whole), bytes(&values.whole)];
            assert!(before == after, "{text:?}: {what}: written beyond the view");
        }
        for View { what, whole, view } in views(&parts.floats) {
            let before = bytes(&whole);
            check(&format!("floats are {what}"), CacheParts { floats: view, ..plain() });
            assert!(before == bytes(&whole), "{text:?}: {what}: written beyond the view");
        }
    }
}

fn one_row_for_all_is_parts_of_a_cache<T: Target>(on: &On<T>) {
    let text = text("k2v2-g16-r16");
    let empty = text.cache(on).into_parts();
    let expected = go_on(&text, text.cache(on).into_parts(), 0, on);
    let word = |like: &Tensor<1, Int>| {
        Tensor::<1, Int>::zeros([1], (&**on, DType::U32)).expand(like.dims())
    };
    let row = Tensor::<4>::zeros([1; 4], &**on).expand(empty.floats.dims());
    for parts in [
        CacheParts { keys: word(&empty.keys), ..text.cache(on).into_parts() },
        CacheParts { values: word(&empty.values), ..text.cache(on).into_parts() },
        CacheParts { floats: row, ..text.cache(on).into_parts() },
    ] {
        assert!(go_on(&text, parts, 0, on) == expected, "{text:?}");
    }
}
