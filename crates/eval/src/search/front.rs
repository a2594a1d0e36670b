//! The choice of a format for every cell, given the bytes and the cost of each choice.

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    pub(crate) bytes: usize,
    pub(crate) cost: f64,
}

/// The choice of every cell, by number.
pub(crate) type Assignment = Vec<usize>;

/// Returns the lower convex hull of the choices of a cell, in ascending order of cost. Each choice
/// of the hull is the best one for some price of a byte.
fn hull(choices: &[Choice]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..choices.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (choices[a], choices[b]);
        a.cost.total_cmp(&b.cost).then(a.bytes.cmp(&b.bytes))
    });
    let mut hull: Vec<usize> = vec![];
    for next in order {
        // It costs more than the last choice, so it is useful only with fewer bytes.
        if hull.last().is_some_and(|&last| choices[next].bytes >= choices[last].bytes) {
            continue;
        }
        while let [.., before, last] = hull[..]
            && price(choices[before], choices[last]) >= price(choices[last], choices[next])
        {
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

/// Returns the loss per byte saved by going from one choice to another.
fn price(from: Choice, to: Choice) -> f64 {
    (to.cost - from.cost) / (from.bytes - to.bytes) as f64
}

/// Returns assignments from the least cost to the fewest bytes. Each changes the choice of one
/// cell, and no assignment with as few bytes costs less.
pub(crate) fn front(cells: &[Vec<Choice>]) -> Vec<Assignment> {
    let hulls: Vec<Vec<usize>> = cells.iter().map(|choices| hull(choices)).collect();
    let mut steps: Vec<(f64, usize, usize)> = vec![];
    for (cell, hull) in hulls.iter().enumerate() {
        for pair in hull.windows(2) {
            let price = price(cells[cell][pair[0]], cells[cell][pair[1]]);
            steps.push((price, cell, pair[1]));
        }
    }
    // Prices rise along the hull of a cell, so sorting keeps their order.
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut at: Assignment = hulls.iter().map(|hull| hull[0]).collect();
    let mut front = vec![at.clone()];
    for (_, cell, choice) in steps {
        at[cell] = choice;
        front.push(at.clone());
    }
    front
}

pub(crate) fn sum(cells: &[Vec<Choice>], assignment: &[usize]) -> Choice {
    let chosen = cells.iter().zip(assignment).map(|(choices, &choice)| choices[choice]);
    chosen.fold(Choice { bytes: 0, cost: 0.0 }, |sum, choice| Choice {
        bytes: sum.bytes + choice.bytes,
        cost: sum.cost + choice.cost,
    })
}

/// Returns the first point of the front within the byte budget, with single choices improved while
/// they fit; `None` if the fewest bytes exceed the budget.
pub(crate) fn within(cells: &[Vec<Choice>], bytes: usize) -> Option<Assignment> {
    let fits = |assignment: &Assignment| sum(cells, assignment).bytes <= bytes;
    let mut best = front(cells).into_iter().find(fits)?;
    loop {
        let now = sum(cells, &best);
        let mut better: Option<(f64, usize, usize)> = None;
        for (cell, choices) in cells.iter().enumerate() {
            let old = choices[best[cell]];
            for (choice, new) in choices.iter().enumerate() {
                let gain = old.cost - new.cost;
                let fits = now.bytes - old.bytes + new.bytes <= bytes;
                if fits && gain > 0.0 && better.is_none_or(|(most, ..)| gain > most) {
                    better = Some((gain, cell, choice));
                }
            }
        }
        match better {
            Some((_, cell, choice)) => best[cell] = choice,
            None => return Some(best),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use super::*;

    /// Small problems with random choices, including dominated ones.
    fn problems() -> impl Iterator<Item = Vec<Vec<Choice>>> {
        let mut state = 7u64;
        let mut next = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        (0..200).map(move |_| {
            let n_cells = 1 + next(5);
            let choice = |next: &mut dyn FnMut(u64) -> u64| Choice {
                bytes: next(50) as usize,
                cost: next(40) as f64 - 2.0,
            };
            (0..n_cells).map(|_| (0..1 + next(4)).map(|_| choice(&mut next)).collect()).collect()
        })
    }

    fn all(cells: &[Vec<Choice>]) -> Vec<Choice> {
        let mut sums = vec![Choice { bytes: 0, cost: 0.0 }];
        for choices in cells {
            let add = |sum: &Choice| {
                let sum = *sum;
                choices.iter().map(move |choice| Choice {
                    bytes: sum.bytes + choice.bytes,
                    cost: sum.cost + choice.cost,
                })
            };
            sums = sums.iter().flat_map(add).collect();
        }
        sums
    }

    #[test]
    fn nothing_of_no_more_bytes_costs_less_than_the_front() {
        for cells in problems() {
            let (all, front) = (all(&cells), front(&cells));
            let sums: Vec<Choice> = front.iter().map(|at| sum(&cells, at)).collect();
            assert!(sums.is_sorted_by(|a, b| a.bytes > b.bytes && a.cost <= b.cost), "{sums:?}");
            for at in &sums {
                assert!(all.iter().all(|other| other.bytes > at.bytes || other.cost >= at.cost));
            }
            let fewest = all.iter().map(|sum| sum.bytes).min().unwrap();
            assert_eq!(sums.last().unwrap().bytes, fewest);
        }
    }

    #[test]
    fn what_is_found_fits_and_is_near_the_best() {
        let (mut found, mut best) = (0.0, 0.0);
        for cells in problems() {
            let all = all(&cells);
            let fewest = all.iter().map(|sum| sum.bytes).min().unwrap();
            assert!(fewest == 0 || within(&cells, fewest - 1).is_none());
            for bytes in (fewest..fewest + 80).step_by(7) {
                let at = sum(&cells, &within(&cells, bytes).unwrap());
                let fits = all.iter().filter(|other| other.bytes <= bytes);
                let least = fits.map(|other| other.cost).fold(f64::INFINITY, f64::min);
                assert!(at.bytes <= bytes && at.cost >= least);
                // The least cost is -2 for each of up to five cells.
                found += at.cost + 10.0;
                best += least + 10.0;
            }
        }
        assert!(found <= 1.1 * best, "{found} is found where {best} is the best");
    }
}
