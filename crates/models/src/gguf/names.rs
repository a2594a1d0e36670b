/// An architecture's names of tensors in GGUF files and in Hugging Face files. They omit the
/// Hugging Face prefix, `.weight` and `.bias`.
#[derive(Clone, Copy, Debug)]
pub struct GgufNames {
    /// The prefixes of a layer's tensors before its number: GGUF, Hugging Face.
    pub layer: (&'static str, &'static str),
    /// The tensors outside of the layers: GGUF, Hugging Face.
    pub outer: &'static [(&'static str, &'static str)],
    /// The tensors of a layer: GGUF, Hugging Face.
    pub inner: &'static [(&'static str, &'static str)],
    /// The names of tensors that the tables above do not have.
    pub base: Option<&'static Self>,
}

impl GgufNames {
    /// Returns the Hugging Face name of a GGUF tensor. A name that is not in the tables is
    /// unchanged.
    pub fn to_hugging_face(&self, name: &str) -> String {
        self.translate(name, true)
    }

    /// Returns the GGUF name of a tensor. A name that is not in the tables is unchanged.
    pub fn to_gguf(&self, name: &str) -> String {
        self.translate(name, false)
    }

    fn translate(&self, name: &str, to_hugging_face: bool) -> String {
        let pick = |&(gguf, hf): &(&'static str, &'static str)| {
            if to_hugging_face { (gguf, hf) } else { (hf, gguf) }
        };
        let (from, to) = pick(&self.layer);
        let (head, name, is_inner) = match name.strip_prefix(from).and_then(|n| n.split_once('.')) {
            Some((layer, rest)) => (format!("{to}{layer}."), rest, true),
            None => (String::new(), name, false),
        };
        let Some((stem, suffix)) = name.rsplit_once('.') else { return format!("{head}{name}") };
        let tables = std::iter::successors(Some(self), |names| names.base);
        let mut pairs = tables.flat_map(|it| if is_inner { it.inner } else { it.outer }).map(pick);
        match pairs.find(|(from, _)| *from == stem) {
            Some((_, to)) => format!("{head}{to}.{suffix}"),
            None => format!("{head}{stem}.{suffix}"),
        }
    }
}
