//! Memory of a cache that holds no token affects no output, even if it is NaN.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_cubecl::{CacheParts, KvCache, On, Target};

use crate::common::{Rng, Setup, attend, check_properties, chunk_sizes, equal_bits, setups, stamp};

stamp!(poison_in_every_configuration, any_poisoned_cache);

/// An empty cache of the text's shape whose memory is full of NaN: in the float rows, and as scale
/// and minimum (0x7e00 is f16's NaN) in every packed word.
fn poisoned<T: Target>(text: &Setup, on: &On<T>) -> KvCache {
    let parts = text.cache(on).into_parts();
    let words = |tensor: Tensor<1, Int>| {
        let poison = vec![0x7e00_7e00u32; tensor.dims()[0]];
        let len = [poison.len()];
        Tensor::<1, Int>::from_data(TensorData::new(poison, len), (&**on, DType::U32))
    };
    let parts = CacheParts {
        keys: words(parts.keys),
        values: words(parts.values),
        floats: Tensor::full(parts.floats.dims(), f32::NAN, (&**on, parts.floats.dtype())),
        lens: parts.lens,
    };
    KvCache::from_parts(&text.config, text.shape(), parts).unwrap()
}

/// Compares a run with and without poison, at a capacity that the text fills and at a larger one.
#[track_caller]
fn check<T: Target>(on: &On<T>, text: &Setup, sizes: &[usize]) {
    for spare in [0, 45] {
        let capacity = text.config.capacity + spare;
        let text = Setup { config: text.config.with_capacity(capacity), ..text.clone() };
        let expected = attend(&mut text.cache(on), &text, sizes, on);
        let got = attend(&mut poisoned(&text, on), &text, sizes, on);
        let nan = got.data.iter().position(|x| x.is_nan());
        assert!(nan.is_none(), "{text:?} in chunks {sizes:?}: output {nan:?} is NaN");
        equal_bits(format!("{text:?} in chunks {sizes:?}"), &got.data, &expected.data);
    }
}

fn poison_in_every_configuration<T: Target>(on: &On<T>) {
    let names =
        ["k2v2-g16-r16", "k4v8-g16-r32-s3-after", "k16v2-g32-r32", "k4v16-g32-r32-s1", "float"];
    for name in names {
        let text = Setup::new(name, [1, 2, 1, 70, 64], 40);
        for sizes in [vec![1; 70], vec![70], vec![5, 1, 20, 2, 1, 1, 40]] {
            check(on, &text, &sizes);
        }
    }
    if on.supports_dtype(DType::F16) {
        check(on, &Setup::new("k2v2-g16-r16-f16", [1, 2, 1, 40, 64], 41), &[1; 40]);
    }
}

fn any_poisoned_cache<T: Target>(on: &On<T>) {
    check_properties(8, setups(), |text| {
        let mut rng = Rng::new(text.seed);
        let sizes = chunk_sizes(&mut rng, text.len(), 9);
        check(on, &text, &sizes);
    });
}
