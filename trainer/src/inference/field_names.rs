//! Field names of a row, without its values.

use std::fmt;

use serde::ser::{Impossible, SerializeStruct};
use serde::{Serialize, Serializer};

/// Returns the field names of a struct; `None` for a value of another kind.
pub(super) fn field_names(row: &impl Serialize) -> Option<Vec<&'static str>> {
    let mut names = vec![];
    row.serialize(FieldNames(|name| names.push(name))).ok().map(|()| names)
}

/// Returns `true` if a row is a struct with these fields, in this order. Allocates nothing.
pub(super) fn has_fields(row: &impl Serialize, names: &[&'static str]) -> bool {
    let (mut is_equal, mut expected) = (true, names.iter());
    let visit = |name| is_equal &= expected.next() == Some(&name);
    let is_struct = row.serialize(FieldNames(visit)).is_ok();
    is_struct && is_equal && expected.next().is_none()
}

/// Serializer that passes the field names of a struct to a function. Any other value is an error.
struct FieldNames<F>(F);

macro_rules! refuse {
    ($($method:ident($($argument:ty),*) -> $result:ty,)*) => {
        $(fn $method(self, $(_: $argument),*) -> Result<$result, fmt::Error> {
            Err(fmt::Error)
        })*
    };
}

impl<F: FnMut(&'static str)> Serializer for FieldNames<F> {
    type Ok = ();
    type Error = fmt::Error;
    type SerializeSeq = Impossible<(), fmt::Error>;
    type SerializeTuple = Impossible<(), fmt::Error>;
    type SerializeTupleStruct = Impossible<(), fmt::Error>;
    type SerializeTupleVariant = Impossible<(), fmt::Error>;
    type SerializeMap = Impossible<(), fmt::Error>;
    type SerializeStruct = Self;
    type SerializeStructVariant = Impossible<(), fmt::Error>;

    refuse! {
        serialize_bool(bool) -> (),
        serialize_i8(i8) -> (),
        serialize_i16(i16) -> (),
        serialize_i32(i32) -> (),
        serialize_i64(i64) -> (),
        serialize_u8(u8) -> (),
        serialize_u16(u16) -> (),
        serialize_u32(u32) -> (),
        serialize_u64(u64) -> (),
        serialize_f32(f32) -> (),
        serialize_f64(f64) -> (),
        serialize_char(char) -> (),
        serialize_str(&str) -> (),
        serialize_bytes(&[u8]) -> (),
        serialize_none() -> (),
        serialize_unit() -> (),
        serialize_unit_struct(&'static str) -> (),
        serialize_unit_variant(&'static str, u32, &'static str) -> (),
        serialize_seq(Option<usize>) -> Self::SerializeSeq,
        serialize_tuple(usize) -> Self::SerializeTuple,
        serialize_tuple_struct(&'static str, usize) -> Self::SerializeTupleStruct,
        serialize_tuple_variant(&'static str, u32, &'static str, usize)
            -> Self::SerializeTupleVariant,
        serialize_map(Option<usize>) -> Self::SerializeMap,
        serialize_struct_variant(&'static str, u32, &'static str, usize)
            -> Self::SerializeStructVariant,
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), fmt::Error> {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), fmt::Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        value: &T,
    ) -> Result<(), fmt::Error> {
        value.serialize(self)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self, fmt::Error> {
        Ok(self)
    }
}

impl<F: FnMut(&'static str)> SerializeStruct for FieldNames<F> {
    type Ok = ();
    type Error = fmt::Error;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        _: &T,
    ) -> Result<(), fmt::Error> {
        (self.0)(name);
        Ok(())
    }

    fn end(self) -> Result<(), fmt::Error> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Serialize)]
    struct Size {
        width: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        height: Option<f64>,
    }

    #[derive(Serialize)]
    #[serde(untagged)]
    enum Shape {
        Size(Size),
        Circle { radius: f64 },
        Unknown,
    }

    #[test]
    fn names_are_those_of_the_serialized_struct() {
        let size = |height| Shape::Size(Size { width: 1.0, height });
        for (shape, expected) in [
            (size(None), Some(vec!["width"])),
            (size(Some(2.0)), Some(vec!["width", "height"])),
            (Shape::Circle { radius: 1.0 }, Some(vec!["radius"])),
            (Shape::Unknown, None),
        ] {
            assert_eq!(field_names(&shape), expected);
            assert_eq!(field_names(&Some(&shape)), expected);
            for names in [&["width"][..], &["width", "height"], &["height", "width"], &[]] {
                let is_equal = expected.as_deref() == Some(names);
                assert_eq!(has_fields(&shape, names), is_equal, "{expected:?} {names:?}");
            }
        }
        // A table has no column names for these.
        assert_eq!(field_names(&json!({"width": 1})), None);
        assert_eq!(field_names(&(1, size(None))), None);
    }
}
