//! Random sequences of everything a state can do, against a list of oracles.

use kv_cubecl::{
    On, Target,
    delta::{DeltaMemory, DeltaState},
    reference::DeltaOracle,
};

use crate::{
    common::{Rng, close, sample, stamp},
    delta_inputs::{Layer, TOLERANCE, close_states, configs, positions, sequence},
};

stamp!(any_operations);

/// Operations of a run.
const OPERATIONS: usize = 12;

/// A state and what it should hold.
#[derive(Clone)]
struct Pair {
    state: DeltaState,
    oracles: Vec<DeltaOracle>,
}

/// One sequence of operations. Messages list the operations so far.
struct Run<'a, T: Target> {
    on: &'a On<T>,
    rng: Rng,
    /// The weights; each operation has its own tokens.
    layer: Layer,
    story: String,
}

impl<T: Target> Run<'_, T> {
    fn new(on: &On<T>, seed: u64) -> Run<'_, T> {
        let mut rng = Rng::new(seed);
        // The widest layer takes a software driver long.
        let configs = configs();
        let config = configs[rng.below(configs.len() - 1)];
        let layer = Layer::new(config, 1, 1, seed);
        let story = format!("KV_SEED={seed}, {config:?}:");
        Run { on, rng, layer, story }
    }

    fn go(&mut self) {
        let batch = 1 + self.rng.below(3);
        let state = DeltaState::new(&self.layer.config, batch, self.on).unwrap();
        let mut pool = vec![Pair { state, oracles: vec![self.layer.oracle(); batch] }];
        for _ in 0..OPERATIONS {
            let which = self.rng.below(pool.len());
            let operation = self.rng.below(18);
            let mut pair = pool[which].clone();
            self.story += &format!(" [{which}: op {operation} on {:?}", pair.state.lens());
            match operation {
                0..=2 => self.append(&mut pair),
                3..=6 => self.append_ragged(&mut pair),
                7 | 8 => self.step(&mut pair),
                9 => self.select(&mut pair),
                10 => {
                    let other = &pool[self.rng.below(pool.len())];
                    if pair.oracles.len() + other.oracles.len() <= 4 {
                        let both = [pair.state, other.state.clone()];
                        pair.state = DeltaState::join(&both).unwrap();
                        pair.oracles.extend(other.oracles.iter().cloned());
                    }
                }
                11 => {
                    let (conv, matrices) = pair.state.parts();
                    let (config, lens) = (self.layer.config, pair.state.lens().to_vec());
                    let restored = DeltaState::from_parts(&config, lens, conv, matrices, self.on);
                    pair.state = restored.unwrap();
                }
                12 => {
                    pair.state.reset();
                    pair.oracles.fill(self.layer.oracle());
                }
                13 => self.remove(&mut pair),
                14 => {
                    let other = &pool[self.rng.below(pool.len())];
                    self.admit(&mut pair, other);
                }
                15 | 16 => self.fork(&mut pair),
                _ => self.truncate(&mut pair),
            }
            self.story += "]";
            close_states(&self.story, &pair.state, &pair.oracles, TOLERANCE);
            // A clone shares memory with its origin until either is written.
            match pool.len() < 3 && self.rng.below(3) == 0 {
                true => pool.push(pair),
                false => pool[which] = pair,
            }
        }
        for Pair { state, oracles } in &pool {
            close_states(&self.story, state, oracles, TOLERANCE);
        }
    }

    /// Draws a number of tokens: one, a few, or more than a chunk.
    fn count(&mut self) -> usize {
        let most = [1, 10, 90][self.rng.below(3)];
        1 + self.rng.below(most)
    }

    /// Appends the same number of tokens to all sequences.
    fn append(&mut self, Pair { state, oracles }: &mut Pair) {
        let n = self.count();
        self.story += &format!(", {n}");
        let next = self.layer.with_tokens(&mut self.rng, oracles.len(), n);
        let got = next.mix(DeltaMemory::Cached(state), 0..n, self.on);
        let counts = vec![n; oracles.len()];
        let want = next.push(oracles, &counts);
        close(&self.story, &got, &want.concat(), TOLERANCE);
    }

    /// Appends another number of tokens to each sequence.
    fn append_ragged(&mut self, Pair { state, oracles }: &mut Pair) {
        let m = self.count();
        let counts: Vec<usize> = oracles.iter().map(|_| self.rng.below(m + 1)).collect();
        self.story += &format!(", {counts:?} of {m}");
        let mut next = self.layer.with_tokens(&mut self.rng, oracles.len(), m);
        next.pad(&counts, f32::NAN);
        let got = next.mix(DeltaMemory::Ragged(state, &counts), 0..m, self.on);
        let want = next.push(oracles, &counts);
        for (i, want) in want.iter().enumerate().filter(|(_, want)| !want.is_empty()) {
            let got = sequence(&got, i).tokens(0..counts[i]);
            close(format!("{}: sequence {i}", self.story), &got, want, TOLERANCE);
        }
    }

    /// Appends a token at positions that the device holds.
    fn step(&mut self, Pair { state, oracles }: &mut Pair) {
        let lens: Vec<i32> = state.lens().iter().map(|&len| len as i32).collect();
        let next = self.layer.with_tokens(&mut self.rng, oracles.len(), 1);
        let position = positions(&lens, self.on);
        let got = next.mix(DeltaMemory::At(state, &position), 0..1, self.on);
        state.advance(1).unwrap();
        let want = next.push(oracles, &vec![1; lens.len()]);
        close(&self.story, &got, &want.concat(), TOLERANCE);
    }

    /// Selects sequences, possibly the same one several times.
    fn select(&mut self, Pair { state, oracles }: &mut Pair) {
        let n = 1 + self.rng.below(4);
        let chosen: Vec<usize> = (0..n).map(|_| self.rng.below(oracles.len())).collect();
        *state = state.select(&chosen).unwrap();
        *oracles = chosen.iter().map(|&i| oracles[i].clone()).collect();
    }

    fn remove(&mut self, Pair { state, oracles }: &mut Pair) {
        let i = self.rng.below(oracles.len());
        self.story += &format!(", {i}");
        let held = oracles[i].tokens() > 0;
        assert_eq!(state.remove(i).is_ok(), held, "{}", self.story);
        oracles[i] = self.layer.oracle();
    }

    /// Admits a sequence of another state if its slot is free.
    fn admit(&mut self, Pair { state, oracles }: &mut Pair, other: &Pair) {
        let slot = self.rng.below(oracles.len());
        let from = self.rng.below(other.oracles.len());
        self.story += &format!(", {from} to {slot}");
        let fits = oracles[slot].tokens() == 0 && other.oracles[from].tokens() > 0;
        let alone = other.state.select(&[from]).unwrap();
        assert_eq!(state.admit(slot, &alone).is_ok(), fits, "{}", self.story);
        if fits {
            oracles[slot] = other.oracles[from].clone();
        }
    }

    fn fork(&mut self, Pair { state, oracles }: &mut Pair) {
        let [from, to] = [0; 2].map(|_| self.rng.below(oracles.len()));
        self.story += &format!(", {from} to {to}");
        let fits = oracles[from].tokens() > 0 && oracles[to].tokens() == 0;
        assert_eq!(state.fork(from, to).is_ok(), fits, "{}", self.story);
        if fits {
            oracles[to] = oracles[from].clone();
        }
    }

    /// Cuts a sequence back to a random length; only 0 and its own length are allowed.
    fn truncate(&mut self, Pair { state, oracles }: &mut Pair) {
        let i = self.rng.below(oracles.len());
        let tokens = oracles[i].tokens();
        let len = [0, self.rng.below(tokens + 1), tokens][self.rng.below(3)];
        self.story += &format!(", {i} to {len}");
        let fits = len == 0 || len == tokens;
        assert_eq!(state.truncate(i, len).is_ok(), fits, "{}", self.story);
        if len == 0 {
            oracles[i] = self.layer.oracle();
        }
    }
}

fn any_operations<T: Target>(on: &On<T>) {
    let (n, first) = sample(if T::NAME == "flex" { 300 } else { 8 });
    (first..first + u64::from(n)).for_each(|seed| Run::new(on, seed).go());
}
