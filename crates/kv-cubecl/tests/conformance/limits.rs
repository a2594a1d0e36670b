//! Launches that need more cubes than a device has along one axis: 65535 with WebGPU. They are long
//! on that axis and short on the others, so that they take little time. They call the operations
//! directly, because a whole text of that length takes too long.

use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor, TensorData},
};
use kv_cubecl::{
    AttentionOptions, CacheShape, CacheState, Granularity, KvCacheConfig, KvCacheOps, KvFormat, On,
    Target, fake_quantize,
    layout::{CacheLayout, StreamSpec},
    quantize,
    reference::{self, RowGradients},
};

use crate::common::{CLOSE, Host, Rng, close, equal_bits, stamp};

stamp!(
    many_elements,
    many_rows_of_the_closed_form,
    many_keys_of_its_gradients,
    many_rows_of_a_chunk
);

const HEAD_DIM: usize = 4;

/// Attention of every row of `query` over all of `key` and `value`, in f64.
fn expected(query: &Host, key: &Host, value: &Host) -> Vec<f64> {
    let [query, key, value] = [query, key, value].map(Host::f64);
    let keys: Vec<&[f64]> = key.chunks(HEAD_DIM).collect();
    let values: Vec<&[f64]> = value.chunks(HEAD_DIM).collect();
    let rows = query.chunks(HEAD_DIM);
    rows.flat_map(|row| reference::attend_row(row, &keys, &values)).collect()
}

fn text(rows: usize, tokens: usize) -> [Host; 3] {
    let mut rng = Rng::new(70);
    [rows, tokens, tokens].map(|n| Host::normal(&mut rng, [1, 1, n, HEAD_DIM]))
}

/// A spec by which all rows see all `tokens` tokens.
fn spec(tokens: usize) -> StreamSpec {
    StreamSpec { first_query: tokens - 1, ..StreamSpec::whole(&KvCacheConfig::float()) }
}

fn many_elements<T: Target>(on: &On<T>) {
    let host = Host::normal(&mut Rng::new(71), [1, 1, 131_104, 65]);
    let (granularity, shape) = (Granularity::PerChannel, host.shape);
    // Restoring takes a unit per element: 66577 cubes of 128 units. Quantizing takes one per group.
    let logical = reference::quantize(&host.data, shape, granularity, 4, 8);
    let restored = reference::dequantize(&logical, shape, granularity, 4, 8);
    let packed = quantize(host.on(on), granularity, KvFormat::Affine4, 8).unwrap();
    equal_bits("dequantize", &Host::of(packed.dequantize()).data, &restored);
    let fake = fake_quantize(host.on(on), granularity, KvFormat::Affine4, 8).unwrap();
    equal_bits("fake_quantize", &Host::of(fake).data, &restored);
}

fn many_rows_of_the_closed_form<T: Target>(on: &On<T>) {
    const ROWS: usize = 16 * 65_535 + 5;
    let [query, key, value] = text(ROWS, 3);
    let [q, k, v] = [&query, &key, &value].map(|host| host.on(on).into_dispatch());
    let (output, _) = Dispatch::streaming_attention(
        q,
        k.clone(),
        k,
        v.clone(),
        v,
        spec(3),
        AttentionOptions::default(),
    );
    let output = Host::of(Tensor::from_dispatch(output));
    close("many rows", &output, &expected(&query, &key, &value), CLOSE);
}

fn many_keys_of_its_gradients<T: Target>(on: &On<T>) {
    // First many keys seen by one row (4 keys per cube), then many rows that see two keys (8 rows
    // per cube).
    for (rows, tokens) in [(1, 4 * 65_535 + 5), (8 * 65_535 + 3, 2)] {
        let [query, key, value] = text(rows, tokens);
        let grad = Host::normal(&mut Rng::new(72), query.shape);
        let [q, k, v, g] = [&query, &key, &value, &grad].map(|host| host.on(on).into_dispatch());
        let spec = spec(tokens);
        let (output, lse) = Dispatch::streaming_attention(
            q.clone(),
            k.clone(),
            k.clone(),
            v.clone(),
            v.clone(),
            spec,
            AttentionOptions::default(),
        );
        let got = Dispatch::streaming_attention_backward(
            q,
            k.clone(),
            k,
            v.clone(),
            v,
            output,
            lse,
            g,
            spec,
            AttentionOptions::default(),
        );
        let [key64, value64] = [&key, &value].map(Host::f64);
        let keys: Vec<&[f64]> = key64.chunks(HEAD_DIM).collect();
        let values: Vec<&[f64]> = value64.chunks(HEAD_DIM).collect();
        let (mut d_query, mut d_key) = (Vec::new(), vec![0.0; key.data.len()]);
        let mut d_value = d_key.clone();
        let (query, grad) = (query.f64(), grad.f64());
        for (query, grad) in query.chunks(HEAD_DIM).zip(grad.chunks(HEAD_DIM)) {
            let options = reference::RowOptions::default();
            let RowGradients { query, keys, values, .. } =
                reference::attend_row_backward(query, &keys, &values, grad, options);
            d_query.extend(query);
            d_key.iter_mut().zip(keys.concat()).for_each(|(to, x)| *to += x);
            d_value.iter_mut().zip(values.concat()).for_each(|(to, x)| *to += x);
        }
        let host = |tensor| Host::of(Tensor::from_dispatch(tensor));
        let what = format!("{rows} rows, {tokens} keys");
        close(format!("{what}: query"), &host(got.0), &d_query, 1e-4);
        // One cube adds up what all rows give to a key. Mesa's software driver ends the loops of a
        // shader after 65535 iterations in all (LP_MAX_TGSI_LOOP_ITERATIONS), too few for half a
        // million rows.
        if rows == 1 || T::NAME != "wgpu" {
            close(format!("{what}: key"), &host(got.1), &d_key, 1e-4);
            close(format!("{what}: value"), &host(got.3), &d_value, 1e-4);
        }
    }
}

fn many_rows_of_a_chunk<T: Target>(on: &On<T>) {
    const ROWS: usize = 16 * 65_535 + 5;
    let [query, key, value] = text(ROWS, 3);
    let config = KvCacheConfig::float().with_capacity(3);
    let shape = CacheShape::new(1, 1, HEAD_DIM);
    let layout = CacheLayout::new(&config, shape).unwrap();
    let words = |len: usize| {
        let data = TensorData::new(vec![0u32; len], [len]);
        Tensor::<1, Int>::from_data(data, (&**on, DType::U32)).into_dispatch()
    };
    let sides = layout.sides();
    let state = CacheState {
        keys: words(sides.keys.words(layout.slices())),
        values: words(sides.values.words(layout.slices())),
        floats: Host::cat(&[key.clone(), value.clone()]).on(on).into_dispatch(),
    };
    let (output, _) = Dispatch::decode_attention(
        query.on(on).into_dispatch(),
        state,
        layout,
        3,
        3,
        AttentionOptions::default(),
    );
    let output = Host::of(Tensor::from_dispatch(output));
    close("many rows", &output, &expected(&query, &key, &value), CLOSE);
}
