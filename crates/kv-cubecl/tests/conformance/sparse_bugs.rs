//! Known bugs of other implementations of DeepSeek-V4, a test for each that concerns the cache
//! alone. `docs/decisions/caches.md` lists all and their tests.

use burn::tensor::Tensor;
use kv_cubecl::{
    On, Target,
    sparse::{Compression, SparseCache, SparseConfig, SparseMemory, SparseTensor, Visible},
};

use crate::{
    common::{Host, Rng, close, stamp},
    sparse_cache::{Layer, configs, same},
    sparse_inputs::{Projections, gated},
};

stamp!(a_window_is_stored_before_it_is_compressed, softmax_of_gates_does_not_collapse);

/// Known bug: a kernel reads the projections of a window while another still writes them. A cache
/// that held another sequence has its projections where the new ones are written, so a kernel that
/// reads too early computes entries of the other sequence.
fn a_window_is_stored_before_it_is_compressed<T: Target>(on: &On<T>) {
    for (seed, config) in configs(60).into_iter().enumerate() {
        let layer = Layer::new(on, config, 1, 60, 500 + seed as u64);
        let other = Layer::new(on, config, 1, 60, 600 + seed as u64);
        let want = layer.parallel();
        // Calls that complete windows of 4 tokens with one, two and four tokens, and several.
        for sizes in [vec![1; 60], [3, 1].repeat(15), [2, 2].repeat(15), vec![4; 15], vec![29, 31]]
        {
            let mut cache = layer.cache(on);
            other.stream(&mut cache, &[60]);
            cache.remove(0).unwrap();
            same(format!("{config:?} in {sizes:?}"), layer.stream(&mut cache, &sizes), &want);
        }
    }
}

/// Known bug: a softmax of gates in bf16 collapses. Near 300, numbers of bf16 are 2 apart, so that
/// all gates of a window would be equal.
///
/// In f32 a gate, with its bias and less the largest one, is off by at most 4 x 301 x 2^-24 = 7e-5,
/// which is also the part by which its weight is off.
fn softmax_of_gates_does_not_collapse<T: Target>(on: &On<T>) {
    let (tokens, width) = (24, 16);
    for compression in [Compression::new(8), Compression::overlapping(4)] {
        let mut text = Projections::new(&mut Rng::new(7), compression, [1, tokens, width, 4]);
        // Weights of a window differ by e^2 and more.
        text.parts[1].data.iter_mut().for_each(|x| *x = 300.0 + x.clamp(-0.95, 0.95));
        let want = text.expected(&text.parts.clone().map(|part| part.f64()));
        let [content, gate, bias, gain] = text.on(on);
        let entries = text.entries([&content, &gate, &bias, &gain].map(Clone::clone)).unwrap();
        close(format!("{compression:?}"), &Host::of(entries), &want, 5e-4);
        let config =
            SparseConfig::new(width, 4).with_capacity(tokens).with_compression(compression);
        for sizes in [vec![1; tokens], vec![7, 8, 9]] {
            let mut cache = SparseCache::new(&config, 1, on).unwrap();
            let compressor = text.compressor(bias.clone(), gain.clone());
            for n in sizes {
                let first = cache.len();
                let part = |x: &Tensor<4>| x.clone().narrow(2, first, n);
                let mut memory = SparseMemory::cached(&mut cache, &[n]).unwrap();
                let gated = gated(part(&content), part(&gate));
                let entries = memory.compress(&compressor, gated).unwrap();
                let rows = Tensor::<4>::zeros([1, 1, n, width], &**on);
                memory.attend(rows.clone(), rows, Visible::All(&entries), None).unwrap();
            }
            let parts = cache.parts();
            let entries = parts.iter().find(|part| part.name == "entries").unwrap();
            let SparseTensor::Floats(rows) = &entries.tensor else { panic!("entries are floats") };
            let got = Host::of(rows.clone().unsqueeze_dim(1));
            close(format!("{compression:?}, cached"), &got, &want, 5e-4);
        }
    }
}
