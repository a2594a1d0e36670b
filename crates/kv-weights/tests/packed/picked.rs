//! Products with the experts that are picked, against f64.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_weights::{Activations, WeightFormat, project_picked};

use crate::common::{Blocks, Rng, device_blocks, stamp};

stamp!(
    each_pick_is_a_product_with_its_expert,
    picks_beyond_the_experts_are_the_nearest,
    what_does_not_fit_is_named
);

fn floats(x: &[f32], shape: [usize; 3], device: &Device) -> Tensor<3> {
    Tensor::from_data(TensorData::new(x.to_vec(), shape), device)
}

fn ints(x: &[i32], shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(x.to_vec(), shape), (device, DType::I32))
}

fn each_pick_is_a_product_with_its_expert(device: &Device) {
    // Blocks that begin at words and that do not, rows of one span and of many.
    let formats = [WeightFormat::Mxfp4, WeightFormat::Q4_0, WeightFormat::Q6K, WeightFormat::Q8_0];
    for (case, format) in formats.into_iter().enumerate() {
        for (n, per_token, experts, rows, columns) in
            [(1, 4, 8, 37, 512), (3, 2, 5, 64, 256), (1, 1, 2, 1, 256), (40, 4, 32, 9, 256)]
        {
            let mut rng = Rng::new(1300 + case as u64);
            let blocks = Blocks::random(&mut rng, format, [experts * rows, columns]);
            let (packed, weights) = (device_blocks(&blocks, device), blocks.restored());
            let picked: Vec<i32> = (0..n * per_token).map(|_| rng.below(experts) as i32).collect();
            for of_token in [1, per_token] {
                let x = rng.normals(n * of_token * columns);
                let y = project_picked(
                    floats(&x, [n, of_token, columns], device),
                    &packed,
                    experts,
                    ints(&picked, [n, per_token], device),
                    Activations::Exact,
                );
                let y = y.unwrap();
                assert_eq!(y.dims(), [n, per_token, rows]);
                let y = y.into_data().try_into_vec::<f32>().unwrap();
                for (i, got) in y.iter().enumerate() {
                    let (pick, row) = (i / rows, i % rows);
                    let x = &x[pick / (per_token / of_token) * columns..][..columns];
                    let row = picked[pick] as usize * rows + row;
                    let terms = x.iter().zip(&weights[row * columns..][..columns]);
                    let terms = terms.map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let [sum, size] =
                        terms.fold([0.0, 0.0], |[sum, size], t| [sum + t, size + t.abs()]);
                    let error = (f64::from(*got) - sum).abs();
                    // Sums in f32, in any order.
                    assert!(
                        error <= 1e-5 * size,
                        "{format} of {experts} experts, {n} tokens: {i}: {got}, not {sum}"
                    );
                }
            }
        }
    }
}

fn picks_beyond_the_experts_are_the_nearest(device: &Device) {
    let mut rng = Rng::new(1350);
    let packed = device_blocks(&Blocks::random(&mut rng, WeightFormat::Q4_1, [12, 64]), device);
    let x = floats(&rng.normals(64), [1, 1, 64], device);
    let y = |picked: [i32; 2]| {
        let picked = ints(&picked, [1, 2], device);
        let y = project_picked(x.clone(), &packed, 4, picked, Activations::Exact).unwrap();
        y.into_data().try_into_vec::<f32>().unwrap()
    };
    assert_eq!(y([-3, i32::MAX]), y([0, 3]));
}

fn what_does_not_fit_is_named(device: &Device) {
    let mut rng = Rng::new(1360);
    let packed = device_blocks(&Blocks::random(&mut rng, WeightFormat::Q4_0, [12, 64]), device);
    let says = |shape: [usize; 3], n_experts, picked: [usize; 2], expected: &str| {
        let x = floats(&vec![0.0; shape.iter().product()], shape, device);
        let picked = ints(&vec![0; picked[0] * picked[1]], picked, device);
        let error = project_picked(x, &packed, n_experts, picked, Activations::Exact).unwrap_err();
        assert_eq!(error.to_string(), expected);
    };
    let columns = "the last axis must be 64, the columns of the matrix";
    says([1, 1, 32], 4, [1, 2], &format!("project_picked: x has shape [1, 1, 32]: {columns}"));
    says([1, 1, 64], 5, [1, 2], "n_experts 5: must divide 12, the rows of all experts");
    says([1, 1, 64], 0, [1, 2], "n_experts 0: must divide 12, the rows of all experts");
    for shape in [[2, 1, 64], [1, 3, 64]] {
        let rule = "must be [1, 1 or 2, 64], as picked says";
        says(shape, 4, [1, 2], &format!("project_picked: x has shape {shape:?}: {rule}"));
    }
}
