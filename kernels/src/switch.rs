//! The environment variable `STOKER_KERNELS`.

use std::ffi::OsStr;
use std::sync::OnceLock;

use crate::machine::has_fma;

/// Value of `STOKER_KERNELS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Switch {
    /// All instructions of the processor.
    On,
    /// No AVX-512.
    Avx2,
    /// burn's operators.
    Off,
}

/// Returns `false` if `STOKER_KERNELS` is `off`, or if the processor has no instruction for
/// `a * b + c`. The first call in a process reads the variable.
///
/// # Panics
///
/// `STOKER_KERNELS` is neither `on`, `avx2`, `off` nor empty.
pub fn is_enabled() -> bool {
    switch() != Switch::Off && has_fma()
}

/// Returns the value of `STOKER_KERNELS`. Panics as [`is_enabled`].
pub(crate) fn switch() -> Switch {
    static SWITCH: OnceLock<Switch> = OnceLock::new();
    *SWITCH.get_or_init(|| match parse(std::env::var_os("STOKER_KERNELS").as_deref()) {
        Ok(switch) => switch,
        Err(error) => panic!("{error}"),
    })
}

fn parse(value: Option<&OsStr>) -> Result<Switch, String> {
    match value.map(|value| value.to_string_lossy()).as_deref() {
        None | Some("" | "on") => Ok(Switch::On),
        Some("avx2") => Ok(Switch::Avx2),
        Some("off") => Ok(Switch::Off),
        Some(value) => Err(format!("STOKER_KERNELS is {value:?}; set it to `on`, `avx2` or `off`")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use burn::prelude::*;

    use super::*;
    use crate::testing::random;

    #[test]
    fn variable_is_on_avx2_off_or_refused() {
        let check = |value: Option<&str>, expected: Result<Switch, &str>| {
            let parsed = parse(value.map(OsStr::new));
            assert_eq!(parsed, expected.map_err(String::from), "{value:?}");
        };
        check(None, Ok(Switch::On));
        check(Some(""), Ok(Switch::On));
        check(Some("on"), Ok(Switch::On));
        check(Some("avx2"), Ok(Switch::Avx2));
        check(Some("off"), Ok(Switch::Off));
        check(Some("0"), Err("STOKER_KERNELS is \"0\"; set it to `on`, `avx2` or `off`"));
    }

    /// Marks the child process of `off_calls_operators_of_burn`.
    const ENV_CHILD: &str = "TEST_SWITCH_CHILD";

    #[test]
    fn off_calls_operators_of_burn() {
        if std::env::var_os(ENV_CHILD).is_some() {
            let x: Tensor<2> = random([33, 65], 1).into_tensor(&Device::flex());
            let ours = crate::softmax(x.clone(), 1).into_data();
            assert_eq!(ours, burn::tensor::activation::softmax(x, 1).into_data());
            return;
        }
        let is_same = |switch: &str| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "switch::tests::off_calls_operators_of_burn"]);
            child.env(ENV_CHILD, "").env("STOKER_KERNELS", switch);
            child.output().unwrap().status.success()
        };
        assert!(is_same("off"));
        assert!(!is_same("on"), "the operators differ in no bit, so this test proves nothing");
    }
}
