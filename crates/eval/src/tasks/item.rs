//! Items of a task: [`TaskItem`].

/// The text or the texts whose log-likelihood is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskTarget {
    /// The answer is the choice with the highest log-likelihood.
    Choices {
        /// The choices, without the delimiter before them.
        choices: Vec<String>,
        /// The number of the right choice.
        gold: usize,
    },
    /// The continuation of the context, with the space before it.
    Continuation(String),
}

/// One line of a task file after preprocessing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskItem {
    /// The line in the file, counted from 1.
    pub line: usize,
    /// The field `id` of the line.
    pub id: Option<String>,
    /// The text before choices or continuation.
    pub context: String,
    /// The choices or the continuation.
    pub target: TaskTarget,
}

/// lm-evaluation-harness puts this between a context and a choice (`target_delimiter`).
const DELIMITER: char = ' ';

impl TaskTarget {
    /// Returns the texts that are scored, with the delimiter before choices.
    pub fn continuations(&self) -> Vec<String> {
        match self {
            Self::Choices { choices, .. } => {
                choices.iter().map(|choice| format!("{DELIMITER}{choice}")).collect()
            }
            Self::Continuation(text) => vec![text.clone()],
        }
    }

    /// Returns the number of texts that are scored.
    pub fn len(&self) -> usize {
        match self {
            Self::Choices { choices, .. } => choices.len(),
            Self::Continuation(_) => 1,
        }
    }

    /// Returns whether there are no choices.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of the right choice; `None` for a continuation.
    pub fn gold(&self) -> Option<usize> {
        match self {
            Self::Choices { gold, .. } => Some(*gold),
            Self::Continuation(_) => None,
        }
    }

    /// Returns what messages call a continuation.
    pub(super) fn field(&self, i: usize) -> String {
        match self {
            Self::Choices { .. } => format!("choice {i}"),
            Self::Continuation(_) => "continuation".to_string(),
        }
    }

    /// Returns the characters of each choice, by which `acc_norm` divides log-likelihoods.
    pub(super) fn lengths(&self) -> Vec<usize> {
        match self {
            Self::Choices { choices, .. } => {
                choices.iter().map(|choice| choice.chars().count()).collect()
            }
            Self::Continuation(_) => vec![],
        }
    }
}
