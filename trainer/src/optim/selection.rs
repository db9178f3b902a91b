//! Selection of the parameters that a step updates.

use burn::module::{Module, ParamGroup, ParamId};

use crate::{Result, record};

/// Parameters that a step updates; `None` selects all.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection(Option<Vec<bool>>);

impl std::fmt::Display for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(chosen) = &self.0 else { return f.write_str("all parameters") };
        let indices = (0..).zip(chosen).filter(|(_, is_chosen)| **is_chosen);
        let indices = indices.map(|(index, _): (usize, _)| index);
        write!(f, "parameters {:?}", indices.collect::<Vec<_>>())
    }
}

impl Selection {
    /// Selects the parameters whose path matches this regular expression at any position.
    ///
    /// # Errors
    ///
    /// Fails if the expression is invalid or matches no parameter.
    pub(crate) fn new<M: Module>(of: &str, model: &M) -> Result<Self> {
        let group = ParamGroup::from_regex(of)
            .map_err(|error| format!("step of {of:?}: invalid regular expression: {error:?}"))?;
        let (any, paths) = (ParamId::from(0), record::trained_paths(model));
        let chosen: Vec<bool> = paths.iter().map(|path| group.matches(&any, Some(path))).collect();
        match chosen.contains(&true) {
            true => Ok(Self(Some(chosen))),
            false => {
                Err(format!("step of {of:?}: no match among the parameters {}", paths.join(", "))
                    .into())
            }
        }
    }

    /// Returns whether the parameter at this index is selected.
    pub(crate) fn has(&self, index: usize) -> bool {
        self.0.as_ref().is_none_or(|chosen| chosen.get(index).copied().unwrap_or_default())
    }
}
