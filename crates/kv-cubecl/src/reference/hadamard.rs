//! The Hadamard transform.

use core::ops::{Add, Mul, Sub};

/// `x H / sqrt(n)` for n elements, a power of two, with Sylvester's Hadamard matrix: H of one
/// element is 1, H of 2n elements `[[H, H], [H, -H]]`. The two halves are transformed first, then
/// added and subtracted.
pub fn hadamard<T>(x: &[T]) -> Vec<T>
where
    T: Copy + Add<Output = T> + Sub<Output = T> + Mul<Output = T> + From<f32>,
{
    assert!(x.len().is_power_of_two(), "a power of two, not {}", x.len());
    let scale = T::from(1.0 / (x.len() as f32).sqrt());
    transformed(x).into_iter().map(|x| x * scale).collect()
}

fn transformed<T: Copy + Add<Output = T> + Sub<Output = T>>(x: &[T]) -> Vec<T> {
    if let [x] = x {
        return vec![*x];
    }
    let (a, b) = x.split_at(x.len() / 2);
    let (a, b) = (transformed(a), transformed(b));
    let sums = a.iter().zip(&b).map(|(&a, &b)| a + b);
    sums.chain(a.iter().zip(&b).map(|(&a, &b)| a - b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_elements_by_hand() {
        assert_eq!(hadamard(&[1.0f32, 2.0, 3.0, 4.0]), [5.0, -1.0, -2.0, 0.0]);
        assert_eq!(hadamard(&[5.0f64, -1.0, -2.0, 0.0]), [1.0, 2.0, 3.0, 4.0]);
    }
}
