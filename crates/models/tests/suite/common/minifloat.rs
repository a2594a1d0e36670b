//! Floats of 4 and 8 bits by the definitions of their numbers.

/// Returns all finite numbers of E4M3 with their codes: `m / 8 * 2^-6` for exponent 0, otherwise
/// `(1 + m / 8) * 2^(e - 7)`.
pub(crate) fn e4m3() -> Vec<(u8, f64)> {
    let number = |code: u8| {
        let (e, m) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
        let magnitude = if e == 0 { m * 2f64.powi(-6) } else { (1.0 + m) * 2f64.powi(e - 7) };
        if code >= 128 { -magnitude } else { magnitude }
    };
    (0..=255).filter(|code| code & 127 != 127).map(|code| (code, number(code))).collect()
}

/// Returns all numbers of E2M1 with their codes.
pub(crate) fn e2m1() -> Vec<(u8, f64)> {
    let numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let code = |i: u8| (i, numbers[usize::from(i & 7)] * if i < 8 { 1.0 } else { -1.0 });
    (0..16).map(code).collect()
}

/// Returns the code and the number nearest to `x`, of two equally near ones the even code.
pub(crate) fn nearest(table: &[(u8, f64)], x: f64) -> (u8, f64) {
    let key = |(code, number): &(u8, f64)| ((number - x).abs(), code & 1);
    let order =
        |a: &(u8, f64), b: &(u8, f64)| key(a).partial_cmp(&key(b)).expect("numbers are finite");
    table.iter().copied().min_by(order).expect("a table has numbers")
}
