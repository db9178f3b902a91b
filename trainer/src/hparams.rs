//! Access to the experiment's hyperparameters and data, and names that the program does not read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::de::DeserializeOwned;
use serde_ignored::Path;
use serde_json::Value;

use crate::context::Context;
use crate::error::Unrecoverable;
use crate::{InvalidHyperparameters, Result};

impl Context {
    /// Returns the hyperparameters, deserialized into a user type.
    ///
    /// After the first batch, or a report of progress by a [session](crate::Session), a warning
    /// names hyperparameters that the program has not read, such as misspelled ones.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidHyperparameters`] with the name of the field that does not fit.
    pub fn hparams<T: DeserializeOwned>(&self) -> Result<T> {
        let all = &self.config.hyperparameters;
        let mut ignored = vec![];
        let mut note = |path: Path<'_>| ignored.push(name_of(&path));
        let read =
            serde_path_to_error::deserialize(serde_ignored::Deserializer::new(all, &mut note));
        let read = read.map_err(|error| {
            let error = field_error(&error);
            let unread = self.unread_hparams.lock();
            ignored.retain(|name| unread.iter().any(|unread| is_within(unread, name)));
            ignored.truncate(NAMES_MAX);
            InvalidHyperparameters(
                match error.starts_with("missing field") && !ignored.is_empty() {
                    true => format!("{error}; unknown: {}", ignored.join(", ")),
                    false => error,
                },
            )
        })?;
        self.unread_hparams.retain(|name| ignored.iter().any(|ignored| is_within(name, ignored)));
        Ok(read)
    }

    /// Returns a hyperparameter by name. For nested hyperparameters, join the names with dots.
    pub fn hparam(&self, name: &str) -> Option<&Value> {
        self.unread_hparams.retain(|other| !is_within(other, name));
        name.split('.').try_fold(&self.config.hyperparameters, |value, name| value.get(name))
    }

    /// Returns a hyperparameter by name, deserialized into a user type. For nested hyperparameters,
    /// join the names with dots.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidHyperparameters`] with the name if the hyperparameter is missing or has
    /// another type.
    pub fn hparam_as<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let Some(value) = self.hparam(name) else {
            return Err(InvalidHyperparameters(format!("{name} is missing")).into());
        };
        let read = serde_path_to_error::deserialize(value);
        Ok(read
            .map_err(|error| InvalidHyperparameters(format!("{name}: {}", field_error(&error))))?)
    }

    /// Returns the experiment's `data`, deserialized into a user type.
    ///
    /// # Errors
    ///
    /// Returns the field that does not fit. A trial that ends with this error is not restarted; a
    /// process of a job is.
    pub fn data<T: DeserializeOwned>(&self) -> Result<T> {
        let read = serde_path_to_error::deserialize(&self.config.data);
        Ok(read.map_err(|error| Unrecoverable(format!("spec.data: {}", field_error(&error))))?)
    }

    /// Prints a warning if the program has not read some hyperparameters yet, once.
    pub(crate) fn warn_of_unread_hparams(&self) {
        if let Some(warning) = self.unread_hparams.warning() {
            eprintln!("stoker: warning: {warning}");
        }
    }
}

/// Maximum number of unknown names in an error. Long messages count as different, see
/// `docs/search.md`.
const NAMES_MAX: usize = 5;

/// Names of hyperparameters that the program has not read. Clones share the names.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnreadHparams(Arc<Mutex<Vec<String>>>);

impl UnreadHparams {
    pub(crate) fn new(hyperparameters: &Value) -> Self {
        let mut names = vec![];
        add_names("", hyperparameters, &mut names);
        // The trainer itself reads it, for programs that pass their own size of a batch, too.
        names.retain(|name| name != "global_batch_size");
        Self(Arc::new(Mutex::new(names)))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn retain(&self, is_unread: impl Fn(&str) -> bool) {
        self.lock().retain(|name| is_unread(name));
    }

    /// Returns a warning of the names, and removes them.
    fn warning(&self) -> Option<String> {
        let names = std::mem::take(&mut *self.lock());
        let are_several = if names.len() > 1 { "s" } else { "" };
        (!names.is_empty()).then(|| {
            format!(
                "the program trains, but has not read the hyperparameter{are_several} {}; if a \
                 name is misspelled, correct it",
                names.join(", ")
            )
        })
    }
}

/// Adds the names of all values that are not groups, with the names of their groups before them.
fn add_names(group: &str, value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = if group.is_empty() { name.clone() } else { format!("{group}.{name}") };
                add_names(&name, value, names);
            }
        }
        _ => names.push(group.to_owned()),
    }
}

/// Returns whether a hyperparameter is `group` or in this group.
fn is_within(name: &str, group: &str) -> bool {
    let rest = name.strip_prefix(group);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns the name of an ignored value.
fn name_of(path: &Path<'_>) -> String {
    let below = |parent: &Path<'_>, name: &str| match name_of(parent) {
        group if group.is_empty() => name.to_owned(),
        group => format!("{group}.{name}"),
    };
    match path {
        Path::Root => String::new(),
        Path::Map { parent, key } => below(parent, key),
        Path::Seq { parent, index } => below(parent, &index.to_string()),
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => name_of(parent),
    }
}

/// Formats an error as `field: reason`.
fn field_error<E: std::fmt::Display>(error: &serde_path_to_error::Error<E>) -> String {
    match error.path().to_string().as_str() {
        "." => error.inner().to_string(),
        path => format!("{path}: {}", error.inner()),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::error::exit_code;
    use crate::train::Standalone;
    use stoker_api::contract::ExitCode;

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only the names of the fields matter")]
    struct Hparams {
        rate: f64,
        optimizer: Option<Optimizer>,
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only the names of the fields matter")]
    struct Optimizer {
        momentum: f64,
    }

    fn context(hyperparameters: Value) -> Context {
        let mut context = Standalone { quiet: true, ..Standalone::default() }.context().unwrap();
        context.unread_hparams = UnreadHparams::new(&hyperparameters);
        context.config.hyperparameters = hyperparameters;
        context
    }

    fn unread(context: &Context) -> Vec<String> {
        context.unread_hparams.0.lock().unwrap().clone()
    }

    #[test]
    fn names_that_the_program_lacks_stay_unread() {
        let context = context(json!({
            "global_batch_size": 8, "rate": 1, "hiden": 4,
            "optimizer": {"momentum": 1, "decay": 2}, "other": {"a": 1, "b": [{"c": 1}]},
        }));
        let _: Hparams = context.hparams().unwrap();
        assert_eq!(unread(&context), ["hiden", "optimizer.decay", "other.a", "other.b"]);
        let _: u32 = context.hparam_as("optimizer.decay").unwrap();
        assert!(context.hparam("oth").is_none() && context.hparam("other").is_some());
        assert_eq!(unread(&context), ["hiden"]);
        let warning = context.unread_hparams.warning();
        let expected = "the program trains, but has not read the hyperparameter hiden; if a name \
                        is misspelled, correct it";
        assert_eq!(warning.as_deref(), Some(expected));
        assert_eq!(context.unread_hparams.warning(), None);
    }

    #[test]
    fn values_without_a_type_are_read() {
        let context = context(json!({"rate": 1, "group": {"a": 1}}));
        let _: Value = context.hparams().unwrap();
        assert!(unread(&context).is_empty());
    }

    #[test]
    fn missing_names_are_reported_with_unknown_ones() {
        let error = context(json!({"rat": 1, "size": 2})).hparams::<Hparams>().err().unwrap();
        let expected = "missing field `rate`; unknown: rat, size";
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(exit_code(&*error), ExitCode::InvalidHyperparameters);
    }

    #[test]
    fn invalid_data_is_not_retried() {
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "only the names of the fields matter")]
        struct Input {
            root: String,
        }
        let mut context = context(json!({}));
        context.config.data = json!({"rot": "/x"});
        let error = context.data::<Input>().unwrap_err();
        let expected = "spec.data: rot: unknown field `rot`, expected `root`";
        assert_eq!(error.to_string(), expected);
        assert_eq!(exit_code(&*error), ExitCode::Unrecoverable);
    }
}
