//! Names and ids as strings in JSON.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::extras::ExtraPart;
use crate::identity::{CacheId, Fingerprint};
use crate::layout::{Dtype, SiteKind};

/// Serialises a type as the string that `$show` makes of it and `$read` reads.
macro_rules! as_string {
    ($type:ty, $show:expr, $read:expr) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                #[allow(clippy::redundant_closure_call)]
                serializer.collect_str(&$show(self))
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                $read(&text).map_err(de::Error::custom)
            }
        }
    };
}

as_string!(CacheId, CacheId::to_string, str::parse::<CacheId>);
as_string!(Fingerprint, Fingerprint::to_string, str::parse::<Fingerprint>);
as_string!(Dtype, |dtype: &Dtype| dtype.name(), Dtype::from_name);
as_string!(SiteKind, |kind: &SiteKind| kind.name(), SiteKind::from_name);
as_string!(ExtraPart, |part: &ExtraPart| part.name(), ExtraPart::from_name);
