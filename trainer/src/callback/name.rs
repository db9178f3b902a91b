//! Default names of callbacks.

/// Returns the last part of the path of a type, without type parameters, whose paths contain `::`
/// too.
pub(super) fn short_name(path: &str) -> &str {
    let path = match path.strip_suffix('>') {
        None => path,
        Some(rest) => {
            let mut depth = 1;
            let start = rest.char_indices().rev().find(|(position, character)| {
                match character {
                    // The arrow of a function's type is no bracket.
                    '>' if !rest[..*position].ends_with('-') => depth += 1,
                    '<' => depth -= 1,
                    _ => {}
                }
                depth == 0
            });
            start.map_or(path, |(position, _)| &rest[..position])
        }
    };
    path.rsplit("::").next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use crate::Callback;

    struct Watch<T>(PhantomData<T>);

    impl<T: Send> Callback for Watch<T> {}

    #[test]
    fn names_have_no_type_parameters() {
        assert_eq!(Watch::<String>(PhantomData).name(), "Watch");
        assert_eq!(Watch::<Vec<Watch<u8>>>(PhantomData).name(), "Watch");
        assert_eq!(Watch::<fn(u8) -> Vec<u8>>(PhantomData).name(), "Watch");
    }

    /// The paths of local types contain those of the method's type and trait.
    #[test]
    fn local_types_have_their_own_names() {
        trait Trial {
            fn callback(&self) -> Box<dyn Callback>;
        }
        impl<T: Send> Trial for Watch<T> {
            fn callback(&self) -> Box<dyn Callback> {
                struct Local;
                impl Callback for Local {}
                Box::new(Local)
            }
        }
        assert_eq!(Watch::<String>(PhantomData).callback().name(), "Local");
    }
}
