//! Which parameters a step is of, where it is not of all.

use burn::module::{Module, ParamGroup, ParamId};

use crate::{Result, record};

/// Which parameters a step is of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection(Option<Vec<bool>>);

impl std::fmt::Display for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(chosen) = &self.0 else { return f.write_str("all parameters") };
        let places = (0..).zip(chosen).filter(|(_, it)| **it).map(|(place, _): (usize, _)| place);
        write!(f, "parameters {:?}", places.collect::<Vec<_>>())
    }
}

impl Selection {
    /// Those in whose path this regular expression is found.
    ///
    /// # Errors
    ///
    /// It is none, or finds no parameter.
    pub(crate) fn new<M: Module>(of: &str, model: &M) -> Result<Self> {
        let group = ParamGroup::from_regex(of)
            .map_err(|error| format!("a step of {of:?}: it is no expression: {error:?}"))?;
        let (any, paths) = (ParamId::from(0), record::paths(model));
        let chosen: Vec<bool> = paths.iter().map(|it| group.matches(&any, Some(it))).collect();
        match chosen.contains(&true) {
            true => Ok(Self(Some(chosen))),
            false => Err(format!(
                "a step of {of:?}: it finds none of the parameters {}",
                paths.join(", ")
            )
            .into()),
        }
    }

    /// Whether it has the parameter of this place in the order of visit.
    pub(super) fn has(&self, index: usize) -> bool {
        self.0.as_ref().is_none_or(|it| it.get(index).copied().unwrap_or_default())
    }
}
