//! From values to a place along an axis, and where its ticks are.

/// Beyond this, differences of two values overflow.
const LARGEST: f64 = 1e300;
/// Ticks an axis aims for.
const TICKS: f64 = 8.0;

/// One axis; `low < high`, in powers of ten if it is logarithmic.
#[derive(Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    log: bool,
    /// Value and text.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis over `values` and a margin of `margin` times their range on either side.
    pub(super) fn new(values: &[f64], log: bool, margin: f64) -> Result<Self, String> {
        for &value in values {
            if !value.is_finite() || value.abs() > LARGEST {
                return Err(format!("{value} cannot be drawn"));
            }
            if log && value < 1.0 / LARGEST {
                return Err(format!("{value} is not above 0, as a logarithmic axis needs"));
            }
        }
        let placed = values.iter().map(|&value| if log { value.log10() } else { value });
        let (mut low, mut high) = placed
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        if low > high {
            return Err("there are no points".to_string());
        }
        let whole = !log && values.iter().all(|value| value.fract() == 0.0);
        let largest = low.abs().max(high.abs());
        let widened = high - low <= largest * 1e-9;
        if widened {
            let middle = low / 2.0 + high / 2.0;
            let room = match (log, whole) {
                (true, _) => 0.3,
                (false, true) => (largest * 0.05).max(1.0),
                (false, false) => (largest * 0.05).max(1e-12),
            };
            (low, high) = (middle - room, middle + room);
        } else {
            let room = (high - low) * margin;
            // An axis of counts or sizes does not go below zero.
            let floor = if !log && low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
            (low, high) = ((low - room).max(floor), high + room);
        }
        let ticks = if log { log_ticks(low, high) } else { linear_ticks(low, high, whole) };
        Ok(Self { low, high, log, ticks })
    }

    /// Where `value` lies: 0 at the low end, 1 at the high end.
    pub(super) fn place(&self, value: f64) -> f64 {
        let value = if self.log { value.log10() } else { value };
        (value - self.low) / (self.high - self.low)
    }
}

/// Multiples of 1, 2 or 5 times a power of ten; whole numbers only, if `whole`.
fn linear_ticks(low: f64, high: f64, whole: bool) -> Vec<(f64, String)> {
    let rough = (high - low) / TICKS;
    let power = rough.log10().floor() as i32;
    let scale = 10f64.powi(power);
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|f| f * scale >= rough).unwrap_or(10.0);
    let step = match whole {
        true => (factor * scale).max(1.0),
        false => factor * scale,
    };
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    let count = (last - first).clamp(0.0, 4.0 * TICKS) as usize;
    let largest = low.abs().max(high.abs());
    (0..=count)
        .map(|i| (first + i as f64) * step)
        .map(|value| (value, number(value, step, largest)))
        .collect()
}

/// Powers of ten, with their doubles and halves where there is room; as on a linear axis where the
/// range is within one power.
fn log_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let decades = high - low;
    let every = (decades / TICKS).ceil().max(1.0) as i32;
    let factors: &[f64] = if decades < 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let ticks: Vec<(f64, String)> = (low.floor() as i32..=high.ceil() as i32)
        .filter(|power| power % every == 0)
        .flat_map(|power| factors.iter().map(move |factor| (factor, power)))
        .map(|(factor, power)| {
            let text = match power {
                -3..=4 => format!("{:.*}", (-power).max(0) as usize, factor * 10f64.powi(power)),
                _ => format!("{factor}e{power}"),
            };
            (factor * 10f64.powi(power), text)
        })
        .filter(|(value, _)| (low..=high).contains(&value.log10()))
        .collect();
    if ticks.len() < 3 && decades < 1.0 {
        let (low, high) = (10f64.powf(low), 10f64.powf(high));
        return linear_ticks(low, high, false).into_iter().filter(|tick| tick.0 > 0.0).collect();
    }
    ticks
}

/// `value` with the digits that tell it from its neighbors `step` away, on an axis up to `largest`.
fn number(value: f64, step: f64, largest: f64) -> String {
    let digit = (step.log10() + 1e-9).floor() as i32;
    if value.abs() < step / 2.0 {
        return "0".to_string();
    }
    if (1e-3..1e6).contains(&largest) && digit >= -6 {
        return format!("{value:.*}", (-digit).max(0) as usize);
    }
    let digits = (value.abs().log10() + 1e-9).floor() as i32 - digit;
    format!("{value:.*e}", digits.clamp(0, 12) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(values: &[f64], log: bool) -> Vec<String> {
        let axis = Axis::new(values, log, 0.0).unwrap();
        assert!(axis.low < axis.high, "{axis:?}");
        for &(value, _) in &axis.ticks {
            assert!((-1e-6..=1.0 + 1e-6).contains(&axis.place(value)), "{value} of {axis:?}");
        }
        axis.ticks.into_iter().map(|tick| tick.1).collect()
    }

    #[test]
    fn ticks_are_round_numbers_within_the_range() {
        assert_eq!(texts(&[0.0, 100.0], false), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(texts(&[0.0, 1.0, 2.0], false), ["0", "1", "2"]);
        assert_eq!(texts(&[3.1, 3.3], false), ["3.10", "3.15", "3.20", "3.25", "3.30"]);
        assert_eq!(texts(&[1e-6, 3e-6], false), ["1.0e-6", "1.5e-6", "2.0e-6", "2.5e-6", "3.0e-6"]);
        assert_eq!(texts(&[1.0, 100.0], true), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(texts(&[1e-8, 1e-4], true), ["1e-8", "1e-7", "1e-6", "1e-5", "1e-4"]);
        assert_eq!(
            texts(&[21.0, 24.0], true),
            ["21.0", "21.5", "22.0", "22.5", "23.0", "23.5", "24.0"]
        );
    }

    #[test]
    fn every_finite_range_has_ticks() {
        let large = [-1e300, -1e16, -1.0, 0.0, 1e-300, 1e-20, 0.3, 7.0, 1e16, 1e16 + 2.0, 1e300];
        for &a in &large {
            for &b in &large {
                assert!(!texts(&[a, b], false).is_empty(), "{a} {b}");
                if a > 0.0 && b > 0.0 {
                    assert!(!texts(&[a, b], true).is_empty(), "log {a} {b}");
                }
            }
        }
        for bad in [f64::NAN, f64::INFINITY, -f64::INFINITY, 1e301] {
            Axis::new(&[1.0, bad], false, 0.1).unwrap_err();
        }
        Axis::new(&[0.0], true, 0.1).unwrap_err();
        Axis::new(&[], false, 0.1).unwrap_err();
    }
}
